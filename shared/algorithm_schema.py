"""The algorithm that a run is trained with: one section per algorithm, chosen by `name`.

A section holds only keys that its algorithm uses. Names and defaults are Tunix's, and verl's where Tunix has none.
Packages bring further algorithms (`shared.algorithm_kinds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from pydantic.fields import FieldInfo

from shared.algorithm_base import (
    Aggregation,
    ClippedSection,
    CriticSection,
    EstimatedSection,
    GroupSection,
    PolicyGradientSection,
)
from shared.algorithm_kinds import kinds


class GrpoSection(GroupSection, ClippedSection):
    name: Literal["grpo"] = "grpo"


class DrGrpoSection(GroupSection, ClippedSection):
    name: Literal["drgrpo"]
    loss_agg_mode: Aggregation = "sequence-mean-token-scale"


class RlooSection(GroupSection, ClippedSection):
    name: Literal["rloo"]


class MaxRlSection(GroupSection, ClippedSection):
    name: Literal["maxrl"]


class DapoSection(EstimatedSection, ClippedSection):
    """DAPO. Episodes of more than `overlong_length` - `overlong_buffer` sampled tokens lose up to `overlong_penalty`.

    `overlong_length` null means `grpo_config.max_response_length`, for episodes of one turn.
    """

    name: Literal["dapo"]
    epsilon_high: PositiveFloat | None = 0.28
    overlong_length: PositiveInt | None = None
    overlong_buffer: PositiveInt | None = None
    overlong_penalty: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _some_are_short(self) -> Self:
        if self.overlong_length and self.overlong_buffer and self.overlong_buffer >= self.overlong_length:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} of overlong_length={self.overlong_length} penalizes every "
                "episode: it has to be less"
            )
        return self


class GspoSection(EstimatedSection, ClippedSection):
    name: Literal["gspo-token"]
    epsilon: PositiveFloat | None = 3e-4
    epsilon_high: PositiveFloat | None = 4e-4
    loss_agg_mode: Aggregation = "sequence-mean-token-mean"


class PpoSection(CriticSection, ClippedSection):
    name: Literal["ppo"]


AlgorithmSection = Annotated[
    GrpoSection | DrGrpoSection | RlooSection | MaxRlSection | DapoSection | GspoSection | PpoSection,
    Field(discriminator="name"),
]


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
