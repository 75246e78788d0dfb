"""Lineage of a run: the versions that led to the newest one, and those that a later trainer undid."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter

from shared.types import Lineage, WeightVersion

_EPOCH, _STEP = itemgetter(0), itemgetter(1)


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Log of another run that this run trains from after `step`; `lineage` is the other run's when it was forked."""

    run: str
    step: int
    lineage: Lineage


def surviving(found: Collection[WeightVersion]) -> list[WeightVersion]:
    """Return the versions that no later trainer undid by continuing from an earlier step, in order.

    An ancestor has no version of a later epoch at a lower step.
    """
    first: dict[int, int] = {}
    for one in found:
        first[one.epoch] = min(one.step, first.get(one.epoch, one.step))
    last, least = dict[int, float](), math.inf
    for epoch in sorted(first, reverse=True):
        last[epoch] = least
        least = min(least, first[epoch])
    return [one for one in found if one.step <= last[one.epoch]]


def epoch_of(step: int, lineage: Sequence[tuple[int, int]]) -> int | None:
    """Return the epoch that trained `step` (1 is the first) along the lineage; None if the lineage starts later."""
    n = bisect_left(lineage, step, key=_STEP)
    return lineage[n - 1][0] if n else None


def in_lineage(version: WeightVersion, lineage: Sequence[tuple[int, int]]) -> bool:
    """True if `version` is an ancestor: its epoch is in the lineage, and no later epoch started before its step."""
    i = bisect_left(lineage, version.epoch, key=_EPOCH)
    if i == len(lineage) or lineage[i][0] != version.epoch:
        return False
    undone_after = lineage[i + 1][1] if i + 1 < len(lineage) else None
    return version.step >= lineage[i][1] and (undone_after is None or version.step <= undone_after)


def in_log(version: WeightVersion, forks: Sequence[ForkPoint]) -> bool:
    """True if `version` may have sampled groups of a log that a fork trains from."""
    return any(in_lineage(version, fork.lineage) for fork in forks)


def until(epoch: int, lineage: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return the lineage as it was in `epoch`."""
    return lineage[: bisect_left(lineage, epoch + 1, key=_EPOCH)]
