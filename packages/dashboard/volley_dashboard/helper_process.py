"""Helper process that exits when its parent does, even if that is killed: its standard input ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def start(
    arguments: Sequence[str], log: Path, *, pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `volley ARGUMENTS` in a session of its own, which no Ctrl-C reaches; its output is appended to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "volley", *arguments],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            pass_fds=pass_fds,
            env=env,
            start_new_session=True,
        )


def end_input(process: subprocess.Popen[Any], wait_s: float) -> int | None:
    """End a process's standard input, and return its exit code; None if it still runs after `wait_s`."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        return process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return None


def end(process: subprocess.Popen[Any], wait_s: float) -> None:
    """End a process by its standard input, and kill it if it still runs after `wait_s`."""
    if end_input(process, wait_s) is None:
        process.kill()
        process.wait()
