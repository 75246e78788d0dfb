"""Resource usage of a run's processes, read from /proc and Redis while they work. Sends no requests to the services.

Memory is the proportional set size (PSS) of pages that no file backs, including swapped ones. Pages of programs and
libraries are left out: they depend on what else runs on the machine, and cannot leak.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from shared.queue.client import command, transaction
from shared.queue.scripts import Keys

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Usage of one service: its process `pid` and all descendants. Memory in bytes."""

    pid: int
    memory: int
    fds: int
    threads: int


@dataclass(frozen=True, slots=True)
class QueueUsage:
    """Memory of Redis in bytes: `used` in total, `clients` by connections and buffers, `stream` by its `n_entries`."""

    used: int
    clients: int
    stream: int
    n_entries: int
    n_keys: int


def usage(pids: Mapping[str, int]) -> dict[str, ProcessUsage]:
    """Usage by name of each process with its descendants, except those that have just ended."""
    children = _children()
    found = {name: [_of_process(pid) for pid in _family(pid, children)] for name, pid in pids.items()}
    return {
        name: _sum(pids[name], [one for one in family if one]) for name, family in found.items() if family and family[0]
    }


def usage_alone(pid: int) -> ProcessUsage:
    """Usage of one process without its descendants. Raises ProcessLookupError if it has ended."""
    one = _of_process(pid)
    if one is None:
        raise ProcessLookupError(pid)
    return one


async def queue_usage(redis: Redis, keys: Keys) -> QueueUsage:
    """Raises QueueUnavailable."""
    memory: Mapping[str, Any] = await command(redis, "INFO", "memory")
    stream, n_entries, n_keys = await transaction(
        redis, ("MEMORY", "USAGE", keys.stream, "SAMPLES", 0), ("XLEN", keys.stream), ("DBSIZE",)
    )
    clients = int(memory["mem_clients_normal"]) + int(memory["mem_aof_buffer"])
    return QueueUsage(int(memory["used_memory"]), clients, int(stream or 0), int(n_entries), int(n_keys))


def _sum(pid: int, parts: list[ProcessUsage]) -> ProcessUsage:
    return ProcessUsage(pid, sum(p.memory for p in parts), sum(p.fds for p in parts), sum(p.threads for p in parts))


def _family(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    return [pid, *(member for child in children.get(pid, ()) for member in _family(child, children))]


def _children() -> dict[int, list[int]]:
    """Process ids by parent id."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
            found[int(parent)].append(int(folder.name))
    return found


def _of_process(pid: int) -> ProcessUsage | None:
    """Usage of one process; None if it has ended."""
    folder = _PROC / str(pid)
    try:
        memory = (folder / "smaps_rollup").read_text(encoding="utf-8")
        size = sum(_field(memory, kind) for kind in ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")) * 1024
        threads = _field((folder / "status").read_text(encoding="utf-8"), "Threads:")
        return ProcessUsage(pid, size, len(list((folder / "fd").iterdir())), threads)
    except (OSError, StopIteration):
        return None


def _field(text: str, name: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(name))
