"""Configuration of the generation policy: which groups are started, kept, and trained."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from shared.section import Section


class StragglerConfig(Section):
    """Void groups that take longer than `factor` times the time in which `after_share` of the recent groups ended.

    Another ticket replaces a void group. Nothing is void before a step's number of groups has ended. Slow groups are
    often long answers: voiding them biases training towards short ones.
    """

    after_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    factor: Annotated[float, Field(ge=1)] = 3.0


class GenerationFilters(Section):
    """Filters of complete groups, applied before they are sent to the trainer. A filtered group is replaced.

    Names and meaning are slime's: `reward_nonzero_std` rejects equal rewards; `min_reward` groups without a reward
    above it; `response_diversity` groups with a smaller share of different responses; `reasonable_length` groups whose
    mean of sampled tokens per episode is outside [min, max]; `quality_and_diversity` is reward_nonzero_std and
    response_diversity=0.5. A rule of one's own is `trainer.filters.custom`.

    `rollout_filter_ratio` (GRL) keeps this share of every `groups_per_step` / ratio groups: those whose rewards have
    the largest standard deviation (`std`), or the smallest (`std_rev`).
    """

    reward_nonzero_std: bool = False
    min_reward: float | None = None
    response_diversity: Annotated[float, Field(gt=0, le=1)] | None = None
    reasonable_length: tuple[PositiveInt, PositiveInt] | None = None
    quality_and_diversity: bool = False
    rollout_filter_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    rollout_filter_type: Literal["std", "std_rev"] = "std"

    @model_validator(mode="after")
    def _ordered(self) -> GenerationFilters:
        if self.reasonable_length is not None and self.reasonable_length[0] > self.reasonable_length[1]:
            raise ValueError("reasonable_length must be [min, max] with min <= max")
        return self


class GenerationSection(Section):
    """Policy of generation.

    `over_sampling_factor` starts up to this many times `groups_per_step` groups beyond the newest weights, and the
    trainer takes the first complete ones; finished surplus is trained by the next steps. By default as many are started
    as `off_policy_steps` allows.

    In `mode` turn_synchronous, the episodes of a step's groups start together and advance turn by turn: each turn is
    sampled for all episodes that still run before the next one starts.

    With `truncation` left, the oldest turns of a conversation are dropped when the next turn does not fit into the
    context; by default the episode ends.

    With `partial_rollouts`, running episodes are stored after each turn, and continue from their tokens when the
    orchestrator starts again.

    With `concurrency` adaptive, the number of running episodes follows the rollout servers' queues and pools, up to
    `max_concurrent_episodes`; otherwise it is that number. An evaluation runs beside training: it has the share
    `eval_share` of the running episodes, and that share of the rollout servers keeps the version being measured. With
    null, training stops for each evaluation.
    """

    mode: Literal["asynchronous", "turn_synchronous"] = "asynchronous"
    over_sampling_factor: Annotated[float, Field(ge=1)] | None = None
    concurrency: Literal["fixed", "adaptive"] = "fixed"
    truncation: Literal["none", "left"] = "none"
    partial_rollouts: bool = False
    eval_share: Annotated[float, Field(gt=0, le=1)] | None = 0.5
    straggler: StragglerConfig | None = None
    filters: GenerationFilters = GenerationFilters()

    @model_validator(mode="after")
    def _rounds_at_once(self) -> GenerationSection:
        if self.mode == "turn_synchronous" and self.concurrency == "adaptive":
            raise ValueError("mode=turn_synchronous needs concurrency=fixed: all episodes of a round run at once")
        return self


_KEY = "orchestrator.generation"


def round_size(config: GenerationSection, groups_per_step: int) -> int:
    """Return the number of groups that are made for a step at once: those that `rollout_filter_ratio` compares."""
    ratio = config.filters.rollout_filter_ratio
    return groups_per_step if ratio is None else math.ceil(groups_per_step / ratio - 1e-9)


def has_fresh_rounds(config: GenerationSection) -> bool:
    """True if each round is sampled by the newest weights for one step, as in GRL."""
    return config.mode == "turn_synchronous" and config.filters.rollout_filter_ratio is not None


def started_ahead(factor: float, groups_per_step: int) -> int:
    """Return the largest number of groups beyond the durable steps."""
    return math.ceil(factor * groups_per_step - 1e-9)


def defeated(config: GenerationSection, groups_per_step: int, max_staleness: int, n_groups: int) -> str | None:
    """Return why these limits defeat the policy, and the key to change; None if they do not.

    Args:
        n_groups: groups that can run at once.
    """
    factor, ratio = config.over_sampling_factor, config.filters.rollout_filter_ratio
    if factor is not None and math.ceil(factor) - 1 > max_staleness:
        return (
            f"{_KEY}.over_sampling_factor={factor:g} would leave finished groups that are stale when they are trained:"
            f" set grpo_config.off_policy_steps to {math.ceil(factor) - 1} or more, or lower the factor"
        )
    size = round_size(config, groups_per_step)
    if (config.mode == "turn_synchronous" or ratio is not None) and size > n_groups:
        key = f"filters.rollout_filter_ratio={ratio:g}" if ratio is not None else f"mode={config.mode}"
        return (
            f"{_KEY}.{key} needs {size} groups at once, but only {n_groups} run at once: raise"
            " orchestrator.max_concurrent_episodes"
        )
    ahead = (max_staleness + 1) * groups_per_step
    ahead = ahead if factor is None else min(ahead, started_ahead(factor, groups_per_step))
    if ratio is not None and size > ahead:
        return (
            f"{_KEY}.filters.rollout_filter_ratio={ratio:g} compares {size} groups, but only {ahead} may be on their"
            f" way at once: set grpo_config.off_policy_steps to {math.ceil(size / groups_per_step) - 1} or more, and"
            " over_sampling_factor, if set, to that plus 1"
        )
    return None
