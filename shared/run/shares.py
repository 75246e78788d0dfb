"""Shares of a mixture's environments: by weight, with minimum shares, and a fixed share for environments on trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shared.data_schema import MAX_WEIGHT, DataSection
from shared.run.mixture import whole_weights

_CANARY = Fraction(1, 20)
"""Share of the groups that an environment on trial plays."""
_CANARIES = Fraction(1, 5)
"""Largest share of all environments on trial together."""


@dataclass(frozen=True, slots=True)
class Member:
    """An environment of a mixture: `weight` is relative to the others'; a canary has a fixed share instead."""

    weight: Fraction
    min_share: Fraction = Fraction(0)
    canary: bool = False


def configured(data: DataSection) -> dict[str, Member]:
    """Return the environments that a run starts with, the main one first."""
    return {name: Member(exact(entry.weight), exact(entry.min_share)) for name, entry in data.environments.items()}


def exact(weight: Any) -> Fraction:
    """Return the exact decimal value of a weight. Raises ValueError, TypeError."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"{weight!r} is not a weight between 0 and {MAX_WEIGHT}")
    return Fraction(str(weight))


def weights_of(members: Mapping[str, Member]) -> dict[str, int]:
    """Return whole weights of the members.

    Each canary gets one group in twenty (all together at most one in five), every other member at least its minimum
    share, and the rest is divided by weight.
    """
    canaries = [name for name, member in members.items() if member.canary]
    steady = {name: member for name, member in members.items() if not member.canary}
    if not steady:
        return whole_weights(dict.fromkeys(canaries, Fraction(1)))
    each = min(_CANARY, _CANARIES / len(canaries)) if canaries else Fraction(0)
    return whole_weights(_shares(steady, 1 - each * len(canaries)) | dict.fromkeys(canaries, each))


def _shares(members: Mapping[str, Member], total: Fraction) -> dict[str, Fraction]:
    """Divide `total` by weight; members below their minimum share get that share, and the others divide the rest."""
    least_of_all = sum((member.min_share for member in members.values()), Fraction(0))
    fit = min(Fraction(1), total / least_of_all) if least_of_all else Fraction(1)
    least = {name: member.min_share * fit for name, member in members.items()}
    raised = dict[str, Fraction]()
    while True:
        rest = {name: member.weight for name, member in members.items() if name not in raised}
        left, weight = total - sum(raised.values()), sum(rest.values())
        shares = {name: left * one / weight for name, one in rest.items()}
        low = {name: least[name] for name, share in shares.items() if share < least[name]}
        if not low:
            return {**raised, **shares}
        raised |= low
