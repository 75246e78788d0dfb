"""A container engine for tests without one: `run` starts the program in a pid namespace of its own, nothing more.

    python engine.py FOLDER run … IMAGE -c PROGRAM

An image `absent` is not there and cannot be pulled; one `broken` has no Python; the engine fails at the end of `torn`.
FOLDER keeps a file for each container: its process and its options. `rm` ends it as an engine does, by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def fail(text: str, code: int = 1) -> None:
    print(text, file=sys.stderr)
    raise SystemExit(code)


def run(folder: Path, arguments: list[str]) -> None:
    at = next(i for i, one in enumerate(arguments) if one.startswith("--entrypoint")) + 1
    options, image, program = arguments[: at - 1], arguments[at], arguments[at + 1 :]
    values = dict(one.removeprefix("--").partition("=")[::2] for one in options)
    if image == "broken":
        fail('exec: "python3": executable file not found in $PATH', 127)
    place = tempfile.mkdtemp()
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", sys.executable, *program]
    process = subprocess.Popen(command, cwd=place)
    record = folder / values["name"]
    record.write_text("\n".join([str(process.pid), *options]), encoding="utf-8")
    code = process.wait()
    record.unlink(missing_ok=True)
    raise SystemExit(1 if image == "torn" else code if code >= 0 else 128 - code)


def main() -> None:
    folder, (what, *arguments) = Path(sys.argv[1]), sys.argv[2:]
    if what == "run":
        run(folder, arguments)
    elif what in ("image", "pull") and "absent" in arguments[-1]:
        fail(f"Error response from daemon: pull access denied for {arguments[-1]}, repository does not exist")
    elif what == "ps":
        print(*(path.name for path in folder.iterdir()), sep="\n")
    elif what == "rm":
        for name in arguments[1:]:
            with contextlib.suppress(
                FileNotFoundError, ProcessLookupError
            ):  # with --force, one that is gone is no error
                pid = int((folder / name).read_text("utf-8").split()[0])
                (folder / name).unlink()
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
