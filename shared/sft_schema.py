"""Supervised training: data, length, evaluation and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shared.algorithm_base import OptimizerConfig
from shared.section import Section


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str | Path) else value


Files = Annotated[tuple[Path, ...], BeforeValidator(_several, json_schema_input_type=str | list[str])]
"""One path or several: JSONL, Parquet, or folders of them."""


class SftSection(Section):
    """Supervised training: the warm start before RL, or a run of its own (`mode`).

    The warm start runs if `max_steps` or `epochs` is given; a run of its own defaults to one pass over its data.
    `train` are files of conversations, in mode dpo of preference pairs; without files, the environment makes
    `n_demonstrations`. A run of its own measures its loss on `eval` and on the share `eval_fraction` held out of
    `train`, before the first step, every `eval_every_n_steps` and after the last; it saves a checkpoint every
    `save_interval_steps`. `too_long` decides what happens to conversations longer than the longest of
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
        """True if an RL run starts with a warm start."""
        return bool(self.max_steps or self.epochs)

    @model_validator(mode="after")
    def _one_length(self) -> SftSection:
        if self.max_steps and self.epochs:
            raise ValueError("sft.max_steps and sft.epochs both set the length of training: give one of them")
        return self


class DpoSection(Section):
    """Direct preference optimization; `beta` weighs the distance from the initial policy."""

    beta: PositiveFloat = 0.1
