"""Judge the requirements from the evidence of a run. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from tools.chaos.arena import Zombie

type Requirement = Literal[
    "finished",
    "progress",
    "crashed",
    "plan",
    "links",
    "verify",
    "redis",
    "lost",
    "doubly_trained",
    "staleness",
    "zombie",
    "bit_identical",
]


@dataclass(frozen=True, slots=True)
class Broken:
    """A requirement that does not hold, with its evidence."""

    requirement: Requirement
    detail: str

    def __str__(self) -> str:
        return f"{self.requirement}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence at the end of a run.

    unfinished: reason why the run did not finish, or None. stuck: recovery that took too long, or None. skipped:
    number of planned faults that were not injected. injected: number of injected faults. crashed: unexpected ends of
    services. idle: links without traffic. proof: result of `verify`, with `redis` from a proof while the services ran.
    zombies: replaced trainers. unlike: difference from the weights that the run must end with, or None.
    """

    unfinished: str | None
    stuck: str | None
    skipped: int
    injected: int
    crashed: Sequence[str]
    idle: Sequence[str]
    proof: Mapping[str, Any]
    zombies: Sequence[Zombie]
    unlike: str | None


def judge(seen: Evidence) -> list[Broken]:
    """Broken requirements, causes before effects."""
    found: list[Broken] = []
    if seen.stuck is not None:
        found.append(Broken("progress", seen.stuck))
    if seen.unfinished is not None:
        found.append(Broken("finished", seen.unfinished))
    found += [Broken("crashed", line) for line in seen.crashed]
    if not seen.injected:
        found.append(Broken("plan", "there was no fault"))
    if seen.skipped:
        found.append(Broken("plan", f"{seen.skipped} planned faults were not injected: the run ended before"))
    found += [Broken("links", f"the link to {name} had no traffic, so its faults had no effect") for name in seen.idle]
    found += _proof(seen.proof)
    found += [
        Broken("zombie", f"the trainer replaced at {z.at} did not end fenced: {z.last_words}")
        for z in seen.zombies
        if not z.fenced
    ]
    if seen.unlike is not None:
        found.append(Broken("bit_identical", seen.unlike))
    return found


def _proof(proof: Mapping[str, Any]) -> list[Broken]:
    redis = proof.get("redis", "was not asked")
    found = [] if redis == "agrees" else [Broken("redis", f"at the end of the faults: {redis}")]
    found += [Broken(name, f"{proof[name]} tickets") for name in ("lost", "doubly_trained") if proof[name]]
    for violation in proof["violations"]:
        kind = "staleness" if violation["kind"] == "staleness" else "verify"
        places = ", ".join(
            f"{name} {violation[name]}" for name in ("ticket", "step", "file") if violation.get(name) is not None
        )
        found.append(Broken(kind, f"{violation['kind']}: {places}: {violation['detail']}"))
    return found


def spread(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """{service: {median, max}}."""
    return {
        name: {"median": round(median(values), 2), "max": round(max(values), 2)}
        for name, values in sorted(seconds.items())
        if values
    }
