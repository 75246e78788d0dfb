"""Who belongs to a mixture: what the configuration names, what the environment service offers, and what people have
said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shared.errors import DecodeError
from shared.run.mixture import base_name
from shared.run.shares import Member, exact
from shared.schema import MOST_ENVIRONMENTS


@dataclass(frozen=True, slots=True)
class Offer:
    """A row of the environment service's list: only those `active` and `canary` join a run, with a weight above 0."""

    name: str
    state: str
    weight: Fraction


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
