"""Memory that processes have taken, by the kernel's account."""

from __future__ import annotations

import os
from pathlib import Path


def most_resident(pid: int | None = None) -> int:
    """Most bytes that a process, by default this one, has had in memory since its start or `forget_peak`."""
    lines = Path(f"/proc/{pid or os.getpid()}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Let this process's peak begin with what it has in memory now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
