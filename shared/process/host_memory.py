"""Memory of this machine or container, what is left of it, and memory of this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

_CGROUP, _PROC = Path("/sys/fs/cgroup"), Path("/proc")
_LEAST_LEFT = 0.08
"""Share of the memory below which programs soon wait for each other's pages."""
_MOST_WAITED = 0.1
"""Share of a minute that programs may wait for memory."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of a machine or its container, in bytes.

    `host` is the machine's name, `on` says which of the two limits it. `waited` is the share of the last minute in
    which some program waited for memory (pressure stall information); None if the kernel does not count it.
    """

    host: str
    on: str
    total: int
    available: int
    swap_total: int = 0
    swap_free: int = 0
    waited: float | None = None

    @classmethod
    def from_json(cls, value: Any) -> Self | None:
        """Read what `report` of another process returned; None if it is not that."""
        try:
            sizes = {name: int(value[name]) for name in ("total", "available", "swap_total", "swap_free")}
            waited = None if value["waited"] is None else float(value["waited"])
            return cls(host=str(value["host"]), on=str(value["on"]), **sizes, waited=waited)
        except (KeyError, TypeError, ValueError):
            return None

    def shortage(self) -> str | None:
        """Describe the lack of memory; None if there is enough for now."""
        if self.available >= _LEAST_LEFT * self.total and (self.waited or 0.0) < _MOST_WAITED:
            return None
        swap = f", and {_gib(self.swap_total - self.swap_free)} are in swap" if self.swap_total else ""
        waited = "" if self.waited is None else f"; programs waited for memory {self.waited:.0%} of the last minute"
        return (
            f"{self.on} ({self.host}) is short of memory: {_gib(self.available)} of {_gib(self.total)} are available"
            f"{swap}{waited}. End other programs, or stop the run and continue it with settings of `volley plan`"
        )


class _Cgroup(NamedTuple):
    """Control group that limits memory: its folder, the names of its files, and its limit in bytes."""

    folder: Path
    used: str
    cached: str
    limit: int


def measure(cgroup: Path = _CGROUP, proc: Path = _PROC) -> HostMemory:
    """Measure the memory of this machine, or of its container if that has less left. It blocks for microseconds."""
    known = _table(proc / "meminfo", 1024)
    swap, waited = (known.get("SwapTotal", 0), known.get("SwapFree", 0)), _waited(proc / "pressure/memory")
    found = HostMemory(os.uname().nodename, "this machine", known["MemTotal"], known["MemAvailable"], *swap, waited)
    for group in _limits(cgroup, proc):
        try:
            used = int((group.folder / group.used).read_text(encoding="utf-8"))
            cached = _table(group.folder / "memory.stat").get(group.cached, 0)
        except (OSError, ValueError):
            continue
        left = max(0, group.limit - used + cached)
        if group.limit < found.total and left < found.available:
            stalled = _waited(group.folder / "memory.pressure")
            own = waited if stalled is None else stalled
            found = HostMemory(found.host, "this container", group.limit, left, *swap, own)
    return found


def report() -> dict[str, Any] | None:
    """Measure the memory, for the status of a service; None if the kernel does not show it."""
    try:
        return asdict(measure())
    except (OSError, ValueError, KeyError):
        return None


def host_limit(cgroup: Path = _CGROUP, proc: Path = _PROC) -> tuple[int, str]:
    """Return the memory of this machine, or the limit of its container, in bytes, and its name."""
    whole = _table(proc / "meminfo", 1024)["MemTotal"]
    limit = min((group.limit for group in _limits(cgroup, proc)), default=whole)
    return (limit, "this container") if limit < whole else (whole, "this machine")


def resident(statm: Path = _PROC / "self/statm") -> int:
    """Return the resident memory of this process in bytes."""
    return int(statm.read_text(encoding="utf-8").split()[1]) * 4096


def release_freed() -> None:
    """Return the pages of freed blocks of this process's heap to the kernel, where the C library can.

    A heap that keeps its pages for reuse (MALLOC_TRIM_THRESHOLD_) also keeps those of large arrays, among which later
    ones of other sizes find no place.
    """
    with suppress(AttributeError):  # a library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _limits(cgroup: Path, proc: Path) -> Iterator[_Cgroup]:
    """Yield the control groups of this process that limit its memory, of either version, the root's first."""
    paths = {"": "/", "memory": "/"}
    try:
        for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys({*controllers.split(",")} & paths.keys(), path)
    except (OSError, ValueError):  # then the root alone
        pass
    files = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for controller, path in paths.items():
        folder, (limit, used, cached) = cgroup / controller, files[controller]
        for part in ("", *path.strip("/").split("/")):
            folder /= part
            try:
                yield _Cgroup(folder, used, cached, int((folder / limit).read_text(encoding="utf-8")))
            except (OSError, ValueError):  # not there, or "max"
                continue


def _table(path: Path, unit: int = 1) -> Mapping[str, int]:
    """Read lines of a name and a number."""
    rows = (line.split()[:2] for line in path.read_text(encoding="utf-8").splitlines())
    return {name.rstrip(":"): int(value) * unit for name, value in rows}


def _waited(path: Path) -> float | None:
    """Read the share of the last minute in which some task waited; None if the kernel does not count it."""
    try:
        fields = path.read_text(encoding="utf-8").split("\n", 1)[0].split()
        return float(dict(field.split("=") for field in fields[1:])["avg60"]) / 100
    except (OSError, ValueError, KeyError):
        return None


def _gib(n: int) -> str:
    return f"{n / _GIB:.1f} GiB"
