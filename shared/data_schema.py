"""Environments of a run, their shares and rewards: the `data` section of the run's configuration (shared/schema.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from shared.reward_schema import EnvironmentRewards
from shared.section import Fraction, OwnRuleText, Section

MAX_WEIGHT = 1_000_000
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
MOST_ENVIRONMENTS = 256
"""Largest number of environments in a run at once."""


class MixtureEntry(Section):
    """One environment of a mixture.

    Its `weight` is relative to the others' (0: evaluate only), and it gets at least the share `min_share` of the
    groups. `env_config` are settings of a built-in environment: of the one with this name or, for a variant, of `base`.
    A plain number is short for `weight`.
    """

    weight: Weight = 1.0
    min_share: Fraction = 0.0
    env_config: dict[str, Any] = Field(default_factory=dict)
    base: str | None = None


def _entry(value: Any) -> Any:
    return {"weight": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class CurriculumConfig(Section):
    """Curriculum: every `every_groups` groups, multiply each environment's weight by its learnability.

    Learnability goes from `floor` (all samples succeed, or none) to 1 (half of them do). `custom` names a function of a
    file or module that gives other factors.
    """

    every_groups: PositiveInt = 32
    floor: Annotated[float, Field(ge=0.01, le=1.0)] = 0.1
    custom: OwnRuleText | None = None

    @model_validator(mode="after")
    def _replaced(self) -> CurriculumConfig:
        if self.custom and self.floor != type(self).model_fields["floor"].default:
            raise ValueError(f"floor={self.floor:g} has no effect: data.curriculum.custom replaces it")
        return self


class EnvironmentSource(Section):
    """Source of an environment that was given as a file or import path.

    `path` is the file or the package's folder, `entry` the class, `sha256` the digest of the submitted code, `made_of`
    the names of the user's files that were packed into it.
    """

    path: Path
    entry: str | None = None
    sha256: str
    made_of: tuple[str, ...] = ()


class DataSection(Section):
    """Environments, tasks and rewards.

    `env` is an environment's name, a file or an import path; loading the configuration replaces a file or import path
    by a name and records it in `sources` (see shared.run.sources). `train` and `eval` are the files of a dataset
    environment.

    `mixture` names further environments to play beside `env`, the main one, whose weight is 1 unless it is listed too.
    `rewards` adds rewards to an environment's own, by environment.
    """

    env: str = ""
    env_config: dict[str, Any] = Field(default_factory=dict)
    mixture: dict[
        str, Annotated[MixtureEntry, BeforeValidator(_entry, json_schema_input_type=float | MixtureEntry)]
    ] = Field(default_factory=dict)
    curriculum: CurriculumConfig | None = None
    rewards: dict[str, EnvironmentRewards] = Field(default_factory=dict)
    sources: dict[str, EnvironmentSource] = Field(default_factory=dict)
    train: Path | None = None
    eval: Path | None = None
    n_eval_tasks: PositiveInt = 200

    @property
    def environments(self) -> dict[str, MixtureEntry]:
        """All environments that the run starts with, the main one first."""
        main = self.mixture.get(self.env, MixtureEntry())
        return {self.env: main.model_copy(update={"env_config": self.env_config}), **self._others}

    @property
    def _others(self) -> dict[str, MixtureEntry]:
        return {name: entry for name, entry in self.mixture.items() if name != self.env}

    @model_validator(mode="after")
    def _playable(self) -> DataSection:
        if len(self.mixture) >= MOST_ENVIRONMENTS:
            raise ValueError(f"data.mixture names more than {MOST_ENVIRONMENTS - 1} environments")
        main = self.mixture.get(self.env)
        if main is not None and (main.env_config or main.base):
            raise ValueError(f"data.mixture.{self.env}: put settings of data.env into data.env_config")
        rows = self.environments.values()
        if not any(row.weight for row in rows):
            raise ValueError("data.mixture gives no environment a weight above 0, so there is nothing to train on")
        if (least := sum(row.min_share for row in rows)) > 1:
            raise ValueError(f"data.mixture: the min_share of all environments add up to {least:g}, more than 1")
        if wrong := [name for name, row in self.mixture.items() if row.min_share and not row.weight]:
            raise ValueError(f"data.mixture.{wrong[0]}.min_share needs a weight above 0")
        return self
