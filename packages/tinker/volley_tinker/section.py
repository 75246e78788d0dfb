"""Section `tinker` of the configuration: a trainer that clients of Tinker's interface drive."""

from __future__ import annotations

from pydantic import PositiveFloat

from shared.section import PackageSection


class TinkerSection(PackageSection):
    """`model_name` is how clients name the base model (default: the folder's name, or the hub id).

    `result_ttl_s` is how long the result of a request is kept after it is there.
    """

    may_change = True
    reason = "only a server of Tinker's interface reads it"
    model_name: str | None = None
    result_ttl_s: PositiveFloat = 86_400.0
