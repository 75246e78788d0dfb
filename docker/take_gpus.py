"""Start a rollout server on GPUs that no other replica of its container uses.

    python docker/take_gpus.py LOCKS_FOLDER python -m services.rollout --config FILE [KEY=VALUE...]

All replicas see the same GPUs. Each locks as many as its engine needs (`rollout.engine.tp_size`), shows only these to
the command with CUDA_VISIBLE_DEVICES, and becomes the command. The locks end with it.
"""

import argparse
import fcntl
import os
import sys
from pathlib import Path

from shared import config
from shared.errors import VolleyError
from shared.files.locks import lock_file, try_lock
from volley_launch.accelerators import find_accelerators


def main(folder: str, *command: str) -> None:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    arguments = parser.parse_args(command[3:])
    try:
        needed = config.load(arguments.config, arguments.overrides).config.rollout.engine.tp_size
        seen = find_accelerators("gpu", os.environ).names
        taken = take(Path(folder), seen, needed)
    except VolleyError as error:
        raise SystemExit(f"take_gpus: {error}") from None
    if taken is None:
        raise SystemExit(
            f"take_gpus: fewer than {needed} of the GPUs {','.join(seen) or '(none)'} are free: others have them. "
            "Name more in VOLLEY_ROLLOUT_GPUS, or start fewer replicas"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
    os.execvp(command[0], command)  # noqa: S606


def take(folder: Path, names: tuple[str, ...], needed: int) -> list[str] | None:
    """Lock `needed` of the GPUs until this process ends, across exec; None if too few are free."""
    turn = lock_file(folder / "turn")  # one replica at a time: two would each take half of what they need
    fcntl.flock(turn, fcntl.LOCK_EX)
    taken: dict[str, int] = {}
    for name in names:
        lock = lock_file(folder / name)
        if len(taken) < needed and try_lock(lock):
            taken[name] = lock
        else:
            os.close(lock)
    if len(taken) < needed:
        return None
    for lock in taken.values():
        os.set_inheritable(lock, True)
    os.close(turn)
    return list(taken)


if __name__ == "__main__":
    main(*sys.argv[1:])
