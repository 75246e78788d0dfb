"""Sections `sft` and `dpo` of the configuration: data, length, evaluation and checkpoints; and their steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shared.algorithm_base import OptimizerConfig
from shared.run_config import section_of
from shared.schema import RunConfig
from shared.section import PackageSection
from shared.supervised import SupervisedSteps


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str | Path) else value


Files = Annotated[tuple[Path, ...], BeforeValidator(_several, json_schema_input_type=str | list[str])]
"""One path or several: JSONL, Parquet, or folders of them."""


class SftSection(PackageSection):
    """Supervised training: the warm start before RL, or a run of its own (`mode`).

    The warm start runs if `max_steps` or `epochs` is given; a run of its own defaults to one pass over its data.
    `train` are files of conversations, in mode dpo of preference pairs; without files, the environment makes
    `n_demonstrations`. A run of its own measures its loss on `eval` and on the share `eval_fraction` held out of
    `train`, before the first step, every `eval_every_n_steps` and after the last; it saves a checkpoint every
    `save_interval_steps`. `too_long` decides what happens to conversations longer than the longest of
    `trainer.length_buckets`.
    """

    reason = (
        "a warm start is over before the first step, and a supervised run has its data in the order that this decides"
    )
    changeable: ClassVar[Mapping[str, str]] = {
        "eval_every_n_steps": "it only sets how often weights are evaluated",
        "save_interval_steps": "it only sets how often checkpoints are saved",
    }
    paths = ("train", "eval")
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

    def findings(self, config: RunConfig) -> Iterator[str]:
        yield from self.optimizer_config.findings("sft.optimizer_config", self.max_steps)


class DpoSection(PackageSection):
    """Direct preference optimization; `beta` weighs the distance from the initial policy."""

    reason = "losses before and after would belong to different objectives"
    beta: PositiveFloat = 0.1


def steps_of(config: RunConfig) -> SupervisedSteps | None:
    """See `shared.supervised.supervised_steps`."""
    sft, mode = section_of(config, SftSection), config.mode
    if mode == "dpo" and not sft.train:
        raise ValueError("mode=dpo needs sft.train: files of preference pairs")
    if mode == "sft+rl" and not sft.trains:
        raise ValueError("mode=sft+rl needs sft.max_steps or sft.epochs")
    if mode == "sft" and not (sft.train or config.data.env):
        raise ValueError("data.env is missing (or sft.train, files of conversations)")
    if not (config.is_supervised or sft.trains):
        return None
    return SupervisedSteps(
        batch_size=sft.batch_size,
        rows=sft.batch_size * (2 if mode == "dpo" else 1),
        n_steps=sft.max_steps or None,
        demonstrated=not sft.train,
    )
