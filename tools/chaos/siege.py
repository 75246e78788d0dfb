"""Inject rounds of faults in sequence, and record the recovery times."""

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
"""Durable steps between two rounds; a delivered group is trained within as many."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault with its monotonic times.

    `recovery_s`: seconds after `over` until the service, or the one at the end of the link, was ready again.
    """

    fault: Fault
    began: float
    over: float
    recovery_s: float


@dataclass
class SiegeLog:
    """Injected faults and their outcome. `rounds`, `recovered`: rounds and faults that the run recovered from."""

    injected: list[InjectedFault] = field(default_factory=list[InjectedFault])
    zombies: list[Zombie] = field(default_factory=list[Zombie])
    durable: list[Sighting] = field(default_factory=list[Sighting])
    rounds: int = 0
    recovered: int = 0

    @property
    def faults(self) -> list[Fault]:
        return [one.fault for one in self.injected]

    def recoveries(self) -> dict[str, list[float]]:
        """Recovery times in seconds by service, and as `run` those until the next durable step."""
        found: dict[str, list[float]] = defaultdict(list)
        for one in self.injected:
            found[one.fault.at].append(one.recovery_s)
            ahead = self._next_step_s(one.over)
            if ahead is not None:
                found["run"].append(ahead)
        return dict(found)

    def _next_step_s(self, at: float) -> float | None:
        """Seconds from `at` until a further step became durable."""
        before = max((seen.version.step for seen in self.durable if seen.at <= at), default=0)
        return next((seen.at - at for seen in self.durable if seen.at > at and seen.version.step > before), None)


async def inject_rounds(arena: Arena, rounds: Iterable[Round], log: SiegeLog, say: Callable[[str], None]) -> None:
    """Inject all rounds, and wait for recovery after each. Raises RecoveryTimeout if the run does not recover."""
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
                group.create_task(_inject(arena, fault, turns[fault.at], log))
    except* RecoveryTimeout as errors:
        raise RecoveryTimeout(f"after {names}: {_reasons(errors)}") from None
    for name in arena.services:
        await arena.until_ready(name)
    base = arena.newest.step
    await arena.until_step(base + _STEPS_BETWEEN, f"after {names}: the run did not get beyond {arena.newest}")


async def _inject(arena: Arena, fault: Fault, turn: asyncio.Lock, log: SiegeLog) -> None:
    """Inject one fault once its service is ready, and wait for its recovery."""
    await asyncio.sleep(fault.after_s)
    async with turn:
        await arena.until_ready(fault.at)
        began = time.monotonic()
        over = await INJECT[fault.kind](arena, fault)
        await arena.until_ready(fault.at)
        log.injected.append(InjectedFault(fault, began, over, time.monotonic() - over))


def _reasons(errors: BaseExceptionGroup[RecoveryTimeout]) -> str:
    return "; ".join(dict.fromkeys(str(error) for error in errors.exceptions))
