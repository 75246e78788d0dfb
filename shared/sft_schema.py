"""Supervised training: which conversations, for how long, and how often it is measured and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shared.algorithm_schema import OptimizerConfig
from shared.section import Section


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str | Path) else value


Files = Annotated[tuple[Path, ...], BeforeValidator(_several)]
"""One path or several: JSONL, Parquet, or folders of them."""


class SftSection(Section):
    """Supervised training: before step 0 of RL (the warm start; none where neither `max_steps` nor `epochs` is given),
    or of a run of its own (`mode`), which then passes once over its data.

    `train` are files of conversations, of preference pairs in mode dpo; without any, the environment makes
    `n_demonstrations`. A run of its own measures its loss on `eval`, and on the share `eval_fraction` that is held out
    of `train`: before the first step, every `eval_every_n_steps` and after the last; and makes a checkpoint every
    `save_interval_steps`. `too_long` says what becomes of a conversation longer than the longest of
    `trainer.length_buckets`.
    """

    max_steps: NonNegativeInt = 0
    epochs: PositiveInt | None = None
    train: Files = ()
    eval: Files = ()
    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    eval_every_n_steps: PositiveInt | None = None
    too_long: Literal["error", "drop", "truncate"] = "drop"
    n_demonstrations: PositiveInt = 1024
    batch_size: PositiveInt = 32
    save_interval_steps: PositiveInt = 100
    optimizer_config: OptimizerConfig = OptimizerConfig()

    @property
    def trains(self) -> bool:
        """Whether a run of RL begins with it."""
        return bool(self.max_steps or self.epochs)

    @model_validator(mode="after")
    def _one_length(self) -> SftSection:
        if self.max_steps and self.epochs:
            raise ValueError("sft.max_steps and sft.epochs both say how long to train: give one of them")
        return self


class DpoSection(Section):
    """Direct preference optimization; `beta` weighs the distance from the policy at the start."""

    beta: PositiveFloat = 0.1
