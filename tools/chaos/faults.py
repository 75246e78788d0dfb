"""Inject each fault, and undo it.

Every function returns the monotonic time from which recovery counts: when a process was killed, Redis wiped or a zombie
resumed, or when a pause, a full disk or a link fault ended.

Invariant: however its function ends, a fault's changes are undone, except for killed processes and lost data.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping

from shared.errors import Fenced
from shared.process.ports import free_port
from shared.types import WeightVersion
from tools.chaos.arena import Arena, RecoveryTimeout, Zombie
from tools.chaos.logs import failed_with
from tools.chaos.plan import Fault, Kind
from volley.local.processes import Child, last_error

_AHEAD = 2
"""Steps that a zombie's successor makes before the zombie resumes: as many as the zombie may hold groups for."""
_DELAY_S = 0.05
type Inject = Callable[[Arena, Fault], Awaitable[float]]


async def kill(arena: Arena, fault: Fault) -> float:
    """Send SIGKILL to the process, but not to its children."""
    child, began = await _victim(arena, fault.at), time.monotonic()
    os.kill(child.pid, signal.SIGKILL)
    await _ended(arena, child, fault.at)
    return began


async def pause(arena: Arena, fault: Fault) -> float:
    child = await _victim(arena, fault.at)
    os.kill(child.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        _wake(child)
    return time.monotonic()


async def flush(arena: Arena, fault: Fault) -> float:
    """Delete all data in Redis, which keeps running."""
    began = time.monotonic()
    await arena.redis("FLUSHALL")
    return began


async def lose(arena: Arena, fault: Fault) -> float:
    """Kill Redis, and delete its append-only file before its restart."""
    child, began = await _victim(arena, "redis"), time.monotonic()
    os.kill(child.pid, signal.SIGSTOP)
    await asyncio.to_thread(shutil.rmtree, arena.folder.redis / "appendonlydir", ignore_errors=True)
    os.kill(child.pid, signal.SIGKILL)
    await _ended(arena, child, "redis")
    return began


async def disk_full(arena: Arena, fault: Fault) -> float:
    """Keep the trainer's files from growing, as on a full disk, for `for_s` seconds after the trainer notices.

    Raises RecoveryTimeout if the trainer does not report that it waits for the disk, or ends.
    """
    child = await _victim(arena, fault.at)
    _, hard = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        await arena.until(lambda: _feels_full(arena, child), "the trainer did not notice the full disk")
        await asyncio.sleep(fault.for_s)
        if child.exit_code is not None:
            raise RecoveryTimeout(
                f"the trainer did not survive a full disk: {last_error(child.spec.log, child.log_start)}"
            )
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (hard, hard))
    return time.monotonic()


async def delay(arena: Arena, fault: Fault) -> float:
    link = arena.links[fault.at]
    link.delay_s = _DELAY_S
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        link.resume()
    return time.monotonic()


async def stall(arena: Arena, fault: Fault) -> float:
    """Hold the link's traffic for a while, then reset its connections, as a router that lost its state does."""
    link = arena.links[fault.at]
    link.stall()
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        link.cut()
        link.resume()
    return time.monotonic()


async def cut(arena: Arena, fault: Fault) -> float:
    arena.links[fault.at].cut()
    return time.monotonic()


async def zombie(arena: Arena, fault: Fault) -> float:
    """Stop a trainer, replace it, and resume it next to its successor.

    Both must end themselves: the zombie because of its successor, the successor because of the trainer that the
    supervisor starts after the zombie ends.
    """
    first, before = await _victim(arena, "trainer"), arena.newest
    os.kill(first.pid, signal.SIGSTOP)
    second: Child | None = None
    try:
        spec = arena.spec("trainer")
        command = (*spec.command, f"services.trainer.port={free_port()}")
        second = await Child.start(
            dataclasses.replace(spec, name="zombie", command=command, log=spec.log.with_name("zombie.log")),
            arena.reaper,
        )
        await arena.until(lambda: _replaced(arena, before), "a second trainer did not take over")
        began = time.monotonic()
        _wake(first)
        arena.zombies.append(await _fenced(arena, first, before))
        arena.zombies.append(await _fenced(arena, second, arena.newest))
    finally:
        _wake(first)
        if second is not None:
            second.kill()
            await second.stop()
    return began


INJECT: Mapping[Kind, Inject] = {
    "kill": kill,
    "pause": pause,
    "flush": flush,
    "lose": lose,
    "zombie": zombie,
    "disk_full": disk_full,
    "delay": delay,
    "stall": stall,
    "cut": cut,
}


async def _victim(arena: Arena, name: str) -> Child:
    """Process of a service once it is ready. It exists until the caller awaits: only the event loop reaps it."""
    while True:
        await arena.until_ready(name)
        child = arena.child(name)
        if child.exit_code is None:
            return child


async def _feels_full(arena: Arena, child: Child) -> bool:
    return child.exit_code is not None or "disk" in await arena.trainer_waits()


def _wake(child: Child) -> None:
    if child.exit_code is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGCONT)


async def _ended(arena: Arena, child: Child, name: str) -> None:
    await arena.until(lambda: child.exit_code is not None, f"{name} did not die")


def _replaced(arena: Arena, before: WeightVersion) -> bool:
    return arena.newest.epoch > before.epoch and arena.newest.step >= before.step + _AHEAD


async def _fenced(arena: Arena, child: Child, at: WeightVersion) -> Zombie:
    """Wait until the trainer ends itself; if it does not, it counts as not fenced."""
    with contextlib.suppress(RecoveryTimeout):
        await arena.until(lambda: child.exit_code is not None, "a replaced trainer did not end")
    fenced = child.exit_code == 1 and failed_with(child.spec.log, child.log_start, Fenced)
    return Zombie(at, fenced, last_error(child.spec.log, child.log_start))
