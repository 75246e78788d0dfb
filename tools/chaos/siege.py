"""Carries out rounds of faults, one after the other, and notes how long everything took to come back."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tools.chaos.arena import Arena, RecoveryTimeout, Sighting, Zombie
from tools.chaos.faults import INJECT
from tools.chaos.plan import Fault, Round

_STEPS_BETWEEN = 2
"""Durable steps between two rounds: a group that is delivered is trained within so many."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """`began` and `over` are monotonic; `recovery_s` is until the service, or the one at the end of the link, was ready
    again.
    """

    fault: Fault
    began: float
    over: float
    recovery_s: float


@dataclass
class SiegeLog:
    """What was done, and what came of it. `rounds` counts those that the run recovered from."""

    injected: list[InjectedFault] = field(default_factory=list[InjectedFault])
    zombies: list[Zombie] = field(default_factory=list[Zombie])
    durable: list[Sighting] = field(default_factory=list[Sighting])
    rounds: int = 0
    recovered: int = 0

    @property
    def faults(self) -> list[Fault]:
        return [one.fault for one in self.injected]

    def recoveries(self) -> dict[str, list[float]]:
        """Seconds by service, and for `run` until the next durable step."""
        found: dict[str, list[float]] = defaultdict(list)
        for one in self.injected:
            found[one.fault.at].append(one.recovery_s)
            ahead = self._next_step_s(one.over)
            if ahead is not None:
                found["run"].append(ahead)
        return dict(found)

    def _next_step_s(self, at: float) -> float | None:
        """From `at` until a step became durable that was not before."""
        before = max((seen.version.step for seen in self.durable if seen.at <= at), default=0)
        return next((seen.at - at for seen in self.durable if seen.at > at and seen.version.step > before), None)


async def lay(arena: Arena, rounds: Iterable[Round], log: SiegeLog, say: Callable[[str], None]) -> None:
    """Returns after the last round's recovery. Raises RecoveryTimeout if the run does not recover from one."""
    await arena.until_step(1, "the run made no step")
    for number, faults in enumerate(rounds, start=1):
        say(f"step {arena.newest.step:>4}, round {number}: {', '.join(f'{fault.kind} {fault.at}' for fault in faults)}")
        await _round(arena, faults, log)
        log.rounds += 1
        log.recovered += len(faults)


async def _round(arena: Arena, faults: Round, log: SiegeLog) -> None:
    turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
    names = ", ".join(f"{fault.kind} {fault.at}" for fault in faults)
    try:
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                group.create_task(_one(arena, fault, turns[fault.at], log))
    except* RecoveryTimeout as errors:
        raise RecoveryTimeout(f"after {names}: {_reasons(errors)}") from None
    for name in arena.services:
        await arena.until_ready(name)
    base = arena.newest.step
    await arena.until_step(base + _STEPS_BETWEEN, f"after {names}: the run did not get beyond {arena.newest}")


async def _one(arena: Arena, fault: Fault, turn: asyncio.Lock, log: SiegeLog) -> None:
    """A fault at a service that is ready, or the link to it, and its recovery."""
    await asyncio.sleep(fault.after_s)
    async with turn:
        await arena.until_ready(fault.at)
        began = time.monotonic()
        over = await INJECT[fault.kind](arena, fault)
        await arena.until_ready(fault.at)
        log.injected.append(InjectedFault(fault, began, over, time.monotonic() - over))


def _reasons(errors: BaseExceptionGroup[RecoveryTimeout]) -> str:
    return "; ".join(dict.fromkeys(str(error) for error in errors.exceptions))
