"""The algorithm that a run is trained with: one section per algorithm, chosen by `name`.

A section holds only keys that its algorithm uses. Names and defaults are Tunix's, and verl's where Tunix has none.
Packages bring further algorithms (`shared.algorithm_kinds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from pydantic.fields import FieldInfo

from shared.algorithm_base import (
    ClippedSection,
    CriticSection,
    GroupSection,
    PolicyGradientSection,
)
from shared.algorithm_kinds import kinds


class GrpoSection(GroupSection, ClippedSection):
    name: Literal["grpo"] = "grpo"


class PpoSection(CriticSection, ClippedSection):
    name: Literal["ppo"]


AlgorithmSection = Annotated[GrpoSection | PpoSection, Field(discriminator="name")]


def keys_of(name: str | None) -> Set[str]:
    """Return the keys of the section of algorithm `name`; empty for an unknown name."""
    return _fields(name).keys()


def every_key() -> Set[str]:
    """Return the keys of all algorithms."""
    return {key for one in sections() for key in one.model_fields}


def default_of(name: str | None, key: str) -> Any:
    """Return the default of a key of the section of algorithm `name`, as JSON has it; None if there is none."""
    field = _fields(name).get(key)
    default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
    return default if isinstance(default, bool | int | float | str) else None


def _fields(name: str | None) -> Mapping[str, FieldInfo]:
    return next((one.model_fields for one in sections() if name in get_args(one.model_fields["name"].annotation)), {})


def sections() -> tuple[type[PolicyGradientSection], ...]:
    """Return the sections of all algorithms, those of packages last. Raises ConfigError."""
    return (*get_args(get_args(AlgorithmSection)[0]), *(kind.section for kind in kinds().values()))


def any_section() -> Any:
    """Return the type of any algorithm's section, also of those of packages. Raises ConfigError."""
    every: Any = reduce(or_, sections())
    return Annotated[every, Field(discriminator="name")]
