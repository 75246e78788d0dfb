"""Memory of this machine or container, and of this process."""

from __future__ import annotations

from pathlib import Path


def host_limit(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> tuple[int, str]:
    """Return the memory of this machine, or the limit of its container, in bytes, and its name."""
    whole = next(
        int(line.split()[1]) * 1024
        for line in meminfo.read_text(encoding="utf-8").splitlines()
        if line.startswith("MemTotal")
    )
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((cgroup / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or "max"
            continue
        if limit < whole:
            return limit, "this container"
    return whole, "this machine"


def resident(statm: Path = Path("/proc/self/statm")) -> int:
    """Return the resident memory of this process in bytes."""
    return int(statm.read_text(encoding="utf-8").split()[1]) * 4096
