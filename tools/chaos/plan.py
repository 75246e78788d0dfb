"""Plan faults, their services and their order, as a pure function of the seed.

A round is a set of overlapping faults; the next starts when all services are ready again and the run has made further
steps. Invariants: faults at the same service of a round do not overlap; a round ends the trainer at most once, because
a group that was being trained when several trainers ended counts as poison; no zombie is made while Redis is wiped,
which would fence its successor too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from shared.services import SERVICES, kind_of

type Kind = Literal["kill", "pause", "flush", "lose", "zombie", "disk_full", "delay", "stall", "cut"]
PROCESSES = tuple(info.process(i) for info in SERVICES.values() for i in range(1 + info.replicated))
_OF_NO_RUN = tuple(name for name in PROCESSES if SERVICES[kind_of(name)].run_key is None)
TARGETS = ("redis", *PROCESSES)
LINKS = ("redis", *_OF_NO_RUN)
WIPES: tuple[Kind, ...] = ("flush", "lose")
_SPREAD_S = 0.8
_LATER_S = 0.5
"""Extra delay of faults at services without which no episode runs, so that episodes first lose a server or environment.
"""
_LINK_FAULTS: tuple[Kind, ...] = ("delay", "stall", "cut")
_LIGHT = tuple(name for name in PROCESSES if name != "trainer")
_BESIDE_AN_ORCHESTRATOR = _OF_NO_RUN
"""Services killed in the rounds that spare the orchestrator: its retries would end with it, and go unseen."""
_KILLS_A_STORM, _KILLS_BESIDE_A_ZOMBIE = 14, 12
_LONG_PAUSE_S, _LONG_REDIS_PAUSE_S = 12.0, 16.0
"""Longer than a server's registration and a ticket's lease; than the socket time-out of Redis' clients."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at a service, or at the link to it (`at`).

    `after_s`: seconds from the start of its round. `for_s`: length in seconds, for kinds that have one.
    """

    kind: Kind
    at: str
    after_s: float = 0.0
    for_s: float = 0.0


type Round = tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Amounts:
    """Numbers of kills, wipes of Redis and zombie trainers in a plan; the other kinds are added to these."""

    kills: int
    wipes: int
    zombies: int


def plan(seed: int, amounts: Amounts) -> list[Round]:
    """Rounds of a run with a given number of faults."""
    dice = random.Random(f"chaos {seed}")
    storms = max(
        amounts.wipes, -(-max(0, amounts.kills - _KILLS_BESIDE_A_ZOMBIE * amounts.zombies) // _KILLS_A_STORM), 1
    )
    rounds: list[list[Fault]] = [[_zombie(dice)] for _ in range(amounts.zombies)]
    rounds += [[] for _ in range(storms)]
    wipes: list[Kind] = [WIPES[i % 2] if i < amounts.wipes else "kill" for i in range(storms)]
    dice.shuffle(wipes)
    n_kills = 0
    for faults, wipe in zip(rounds[amounts.zombies :], wipes, strict=True):
        faults.append(_fault(dice, wipe, "redis"))
        faults.append(_fault(dice, "kill", "trainer"))
        n_kills += (wipe != "flush") + 1
    dice.shuffle(rounds)
    for i in range(max(0, amounts.kills - n_kills)):
        nth, number = divmod(i, len(rounds))
        names = _LIGHT if number % 2 else _BESIDE_AN_ORCHESTRATOR
        rounds[number].append(_fault(dice, "kill", names[(number + nth) % len(names)]))
    for faults in rounds:
        faults += [_pause(dice), _fault(dice, dice.choice(_LINK_FAULTS), dice.choice(LINKS))]
    for faults, name in zip(rounds[::8], dice.sample(_LIGHT, len(_LIGHT)), strict=False):
        faults.append(Fault("pause", name, _SPREAD_S, _LONG_PAUSE_S))
    quiet = [_disk_full(dice) for _ in range(max(1, len(rounds) // 10))]
    for one in (*quiet, [Fault("pause", "redis", 0.0, _LONG_REDIS_PAUSE_S)]):
        rounds.insert(dice.randrange(len(rounds) + 1), one)
    return [_in_order(faults) for faults in rounds]


def endless(seed: int) -> Iterator[Round]:
    """Yield small rounds without end, covering every kind and service in turn, for a run of a given length."""
    dice = random.Random(f"chaos {seed}")
    while True:
        heavy = [
            _zombie(dice),
            _fault(dice, "kill", "trainer"),
            *(_fault(dice, kind, "redis") for kind in WIPES),
            *_disk_full(dice),
        ]
        light = [_fault(dice, "kill", name) for name in TARGETS if name != "trainer"]
        light += [_pause(dice), *(_fault(dice, kind, dice.choice(LINKS)) for kind in _LINK_FAULTS)]
        dice.shuffle(heavy)
        dice.shuffle(light)
        for i, first in enumerate(heavy):
            yield _in_order([first, *(one for one in light[i :: len(heavy)] if not _fences(first, one))])


def _fences(first: Fault, other: Fault) -> bool:
    """Tell if `other` would fence the successor of the zombie that `first` makes."""
    return first.kind == "zombie" and other.kind == "kill" and other.at == "redis"


def counts(faults: Iterable[Fault]) -> Counter[str]:
    """Number of faults by kind; both ways to wipe Redis count as `wipe`."""
    return Counter("wipe" if fault.kind in WIPES else str(fault.kind) for fault in faults)


def kills(faults: Iterable[Fault]) -> Counter[str]:
    """Number of SIGKILLs by service."""
    return Counter(fault.at for fault in faults if fault.kind in ("kill", "lose"))


def _in_order(faults: Iterable[Fault]) -> Round:
    return tuple(sorted(faults, key=lambda fault: fault.after_s))


def _fault(dice: random.Random, kind: Kind, at: str) -> Fault:
    length_s = round(dice.uniform(0.3, 2.0), 3) if kind in ("delay", "stall") else 0.0
    later_s = 0.0 if at in _OF_NO_RUN else _LATER_S
    return Fault(kind, at, round(later_s + dice.uniform(0.0, _SPREAD_S), 3), length_s)


def _pause(dice: random.Random) -> Fault:
    return Fault(
        "pause", dice.choice(TARGETS), round(dice.uniform(0.0, _SPREAD_S), 3), round(dice.uniform(0.1, 2.0), 3)
    )


def _zombie(dice: random.Random) -> Fault:
    return Fault("zombie", "trainer", round(dice.uniform(0.0, 0.3), 3))


def _disk_full(dice: random.Random) -> list[Fault]:
    return [Fault("disk_full", "trainer", round(dice.uniform(0.0, _SPREAD_S), 3), round(dice.uniform(0.5, 2.0), 3))]
