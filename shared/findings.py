"""Ineffective and contradictory settings, reported at the start of a run.

A pure function of the configuration. Each finding is one sentence that starts with the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shared import engine_kinds, packages
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.run.group_size import check_group
from shared.run_config import sections_of
from shared.schema import RunConfig


def findings(config: RunConfig) -> list[str]:
    """Return a sentence for each ineffective setting of an RL run; none for a supervised run.

    Those of the core's settings are found by a package. Raises ConfigError for contradictory settings, and for groups
    that may exceed the trainer's size limit.
    """
    if config.is_supervised:
        return []
    check_group(config, None)
    _check_variance(config)
    of_core: Callable[[RunConfig], Iterable[str]] = packages.part("findings", required=False) or (lambda config: ())
    of_packages = (section.findings(config) for section in sections_of(config).values())
    of_engine = engine_kinds.kind_of(config.rollout.engine.kind).findings(config)
    return [f"{one}." for found in (of_core(config), of_engine, *of_packages) for one in found]


def _check_variance(config: RunConfig) -> None:
    """Raise ConfigError if a filter drops every group."""
    early, size = config.orchestrator.generation.filters, config.grpo_config.num_generations
    dropping = {
        "trainer.filters.zero_variance": config.trainer.filters.zero_variance,
        "orchestrator.generation.filters.reward_nonzero_std": early.reward_nonzero_std,
        "orchestrator.generation.filters.quality_and_diversity": early.quality_and_diversity,
    }
    if size < 2 and (keys := [key for key, is_set in dropping.items() if is_set]):
        raise ConfigError(
            f"{keys[0]} with grpo_config.num_generations={size} drops every group: one reward has no variance",
            "turn the filter off, or sample at least 2 episodes a task",
        )


def beyond_positions(config: RunConfig, model: ModelConfig) -> str | None:
    """Return a sentence if sequences may be longer than the model was trained for."""
    most = model.max_position_embeddings
    if config.is_supervised:
        key, longest = "trainer.length_buckets", max(config.trainer.length_buckets)
    else:
        key, longest = "rollout.engine.context_length", config.rollout.engine.context_length
    if longest <= most:
        return None
    return (
        f"{key}={longest} is beyond the model's max_position_embeddings={most}: it was not trained on positions after"
        f" {most}."
    )
