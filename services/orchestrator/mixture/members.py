"""Who belongs to a mixture, and with which share: what the configuration names, what the environment service offers,
and what people have said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shared.errors import DecodeError
from shared.run.mixture import base_name, whole_weights
from shared.schema import MAX_WEIGHT, MOST_ENVIRONMENTS

_CANARY = Fraction(1, 20)
"""Share of the groups that an environment on trial plays."""
_CANARIES = Fraction(1, 5)
"""Share of all that are on trial."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A row of the environment service's list: only those `active` and `canary` join a run, with a weight above 0."""

    name: str
    state: str
    weight: Fraction


@dataclass(frozen=True, slots=True)
class Member:
    """An environment that is played. `weight` is in proportion to the others'; a canary has a fixed share instead."""

    weight: Fraction
    min_share: Fraction = Fraction(0)
    canary: bool = False


def offers_in(answer: Any) -> dict[str, Offer]:
    """The rows of `GET /environments` by name; those without a state are built in, without a weight they do not join
    by themselves. Raises DecodeError.
    """
    try:
        rows: list[Mapping[str, Any]] = answer["environments"]
        found = [Offer(str(row["name"]), str(row.get("state", "active")), exact(row.get("weight", 0))) for row in rows]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DecodeError(f"the list of environments lacks or mistypes a field: {error!r}") from error
    return {offer.name: offer for offer in found}


def exact(weight: Any) -> Fraction:
    """A weight as it is written. Raises ValueError, TypeError."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"{weight!r} is no weight between 0 and {MAX_WEIGHT}")
    return Fraction(str(weight))


def members_of(
    configured: Mapping[str, Member], offers: Mapping[str, Offer], chosen: Mapping[str, float]
) -> dict[str, Member]:
    """Who is to be played. Args: chosen: weights that people gave by name without version; they outrank all others."""
    found = dict[str, Member]()
    for name, member in configured.items():
        weight = exact(chosen[name]) if name in chosen else member.weight
        if weight:
            found[name] = Member(weight, member.min_share)
    for name, offer in sorted(offers.items()):
        said = chosen.get(base_name(name))
        weight = offer.weight if said is None else exact(said)
        if name not in configured and weight and offer.state in ("active", "canary"):
            found[name] = Member(weight, canary=offer.state == "canary")
    return dict(list(found.items())[:MOST_ENVIRONMENTS])


def weights_of(members: Mapping[str, Member]) -> dict[str, int]:
    """Whole weights whose shares give each canary one group in twenty (all together one in five at most), everybody
    its least share, and divide the rest by weight.
    """
    canaries = [name for name, member in members.items() if member.canary]
    steady = {name: member for name, member in members.items() if not member.canary}
    if not steady:
        return whole_weights(dict.fromkeys(canaries, Fraction(1)))
    each = min(_CANARY, _CANARIES / len(canaries)) if canaries else Fraction(0)
    return whole_weights(_shares(steady, 1 - each * len(canaries)) | dict.fromkeys(canaries, each))


def _shares(members: Mapping[str, Member], total: Fraction) -> dict[str, Fraction]:
    """Parts of `total` by weight; whose part would be less than its least share has that, and the others the rest."""
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
