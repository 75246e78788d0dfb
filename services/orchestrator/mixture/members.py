"""Members of a mixture, from the configuration, the environment service's offers, and people's choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from shared.clients.base import MALFORMED
from shared.data_schema import MOST_ENVIRONMENTS
from shared.errors import DecodeError
from shared.run.data import Digests
from shared.run.mixture import base_name
from shared.run.shares import Member, exact

_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class Offer:
    """A row of the environment service's list; only `active` and `canary` ones with a weight above 0 join a run.

    `digests` are those of its data, `sources` the paths or addresses of the data.
    """

    name: str
    state: str
    weight: Fraction
    digests: Digests = field(default_factory=dict[str, str])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])


def offers_in(answer: Any) -> dict[str, Offer]:
    """Parse the rows of `GET /environments` by name. Raises DecodeError.

    Rows without a state are built in; rows without a weight do not join by themselves.
    """
    try:
        found = [_offer(row) for row in answer["environments"]]
    except MALFORMED as error:
        raise DecodeError(f"the list of environments lacks or mistypes a field: {error!r}"[:_MAX_DETAIL]) from error
    return {offer.name: offer for offer in found}


def _offer(row: Mapping[str, Any]) -> Offer:
    if not isinstance(row, dict) or not isinstance(name := row["name"], str):
        raise TypeError("a row is an object with a name")
    data: Mapping[str, Any] = row.get("data") or {}
    digests = {str(part): str(digest) for part, digest in data.get("digests", {}).items()}
    sources = {str(part): str(one["source"]) for part, one in data.get("parts", {}).items()}
    return Offer(name, str(row.get("state", "active")), exact(row.get("weight", 0)), digests, sources)


def members_of(
    configured: Mapping[str, Member], offers: Mapping[str, Offer], chosen: Mapping[str, float]
) -> dict[str, Member]:
    """Return the environments to play. Versions of an environment that is configured by its base name do not join.

    Args:
        chosen: weights that people set by name without version; they override all others.
    """
    found = dict[str, Member]()
    for name, member in configured.items():
        weight = exact(chosen[name]) if name in chosen else member.weight
        if weight:
            found[name] = Member(weight, member.min_share)
    for name, offer in sorted(offers.items()):
        choice = chosen.get(base_name(name))
        weight = offer.weight if choice is None else exact(choice)
        if not {name, base_name(name)} & configured.keys() and weight and offer.state in ("active", "canary"):
            found[name] = Member(weight, canary=offer.state == "canary")
    return dict(list(found.items())[:MOST_ENVIRONMENTS])


def weighted(members: Mapping[str, Member], factors: Mapping[str, float]) -> dict[str, Member]:
    """Multiply weights by the curriculum's factors, and leave out members of factor 0; a canary's share is fixed."""
    found = {env: replace(one, weight=one.weight * exact(factors.get(env, 1))) for env, one in members.items()}
    return {env: one for env, one in found.items() if one.weight}
