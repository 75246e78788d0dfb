"""`gcloud compute tpus tpu-vm` in one file: a worker is a home folder here, and ssh a shell in it.

Like ssh, it waits until no process of the worker holds its output.

A slice of type v4-N has N/8 workers. The state lies in the folder that STUB_GCLOUD names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def install(folder: Path) -> Path:
    """Write the command; returns the folder to put on PATH."""
    (folder / "bin").mkdir(parents=True)
    path = folder / "bin" / "gcloud"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path.parent


def main(folder: Path, arguments: list[str]) -> int:
    assert arguments[:3] == ["compute", "tpus", "tpu-vm"], arguments
    verb, rest = arguments[3], [word for word in arguments[4:] if not word.startswith("--")]
    options = dict(word.lstrip("-").partition("=")[::2] for word in arguments[4:] if word.startswith("--"))
    assert options["zone"] == "us-central2-b", options
    assert "quiet" in options, options
    name = rest[-1].partition(":")[0]
    slice_folder = folder / name
    if verb == "create":
        n_before = len(list(folder.glob("*/worker*")))
        for i in range(int(options["accelerator-type"].removeprefix("v4-")) // 8):
            (slice_folder / f"worker{i}").mkdir(parents=True)
            (slice_folder / f"worker{i}" / "address").write_text(f"127.0.0.{2 + n_before + i}", encoding="utf-8")
        return 0
    homes = sorted(slice_folder.glob("worker*"))
    if not homes:
        print(f"ERROR: {name} was not found", file=sys.stderr)
        return 1
    if verb == "describe":
        print(";".join((home / "address").read_text(encoding="utf-8") for home in homes))
        return 0
    if verb == "delete":
        shutil.rmtree(slice_folder)
        return 0
    chosen = homes if options["worker"] == "all" else [homes[int(options["worker"])]]
    for home in chosen:
        if verb == "scp":
            target = home / rest[-1].partition(":")[2]
            subprocess.run(["cp", "-r", *rest[:-1], str(target)], check=True)
            continue
        environment = {k: v for k, v in os.environ.items() if k in ("PATH", "CODE", "OTHER")} | {"HOME": str(home)}
        shell = ["bash", "-c", options["command"]]
        done = subprocess.run(shell, cwd=home, env=environment, stdout=subprocess.PIPE, check=False)
        sys.stdout.write(done.stdout.decode())
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(os.environ["STUB_GCLOUD"]), sys.argv[1:]))
