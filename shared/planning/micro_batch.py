"""Shape of the micro-batches that a configuration trains on."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError
from shared.schema import RunConfig
from shared.supervised import supervised_steps


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """Shape of a micro-batch.

    `buckets` are row lengths in tokens, ascending; `rows` is the number of rows. With `tokens`, sequences are packed
    into at most so many positions, whose rows divide over `shards`, and `rows` is the most rows of the longest length.
    """

    buckets: tuple[int, ...]
    rows: int
    tokens: int | None = None
    shards: int = 1


def shape_of(config: RunConfig, rows_per_step: int) -> MicroBatchShape:
    """Choose the shape; `rows_per_step` is in sequences.

    Raises ConfigError if the rows do not divide over the mesh, or the longest sequences do not fit.
    """
    trainer = config.trainer
    buckets, tokens_at_once = tuple(sorted(trainer.length_buckets)), trainer.micro_batch_tokens
    rows = min(trainer.train_micro_batch_size or rows_per_step, rows_per_step)
    shards = trainer.mesh.sizes.get("fsdp", 1)
    if tokens_at_once is not None:
        context_length = min(config.rollout.engine.context_length, buckets[-1])  # supervised training has no engine
        longest = next(length for length in buckets if length >= context_length)
        if tokens_at_once < longest * shards:
            raise ConfigError(
                f"trainer.micro_batch_tokens={tokens_at_once} is less than {shards} rows of {longest} tokens",
                f"set it to at least {shards * longest}: one row for each shard of fsdp, of the smallest of"
                " trainer.length_buckets that holds rollout.engine.context_length",
            )
        most = max(1, tokens_at_once // buckets[-1] // shards) * shards
        return MicroBatchShape(buckets, most, tokens_at_once, shards)
    if rows % shards:
        fitting = rows // shards * shards or shards
        key = "trainer.train_micro_batch_size" if fitting <= rows_per_step else "larger steps: a micro-batch"
        raise ConfigError(
            f"micro-batches of {rows} sequences do not divide over fsdp={shards}", f"{key}={fitting}, a multiple of it"
        )
    return MicroBatchShape(buckets, rows)


def rows_of_rl(config: RunConfig) -> int:
    """Sequences of a step of RL, if no episode has several."""
    return config.trainer.groups_per_step * config.grpo_config.num_generations


def rows_of_step(config: RunConfig) -> int:
    """Sequences of an optimizer step; of RL, if no episode has several."""
    steps = supervised_steps(config) if config.is_supervised else None
    return rows_of_rl(config) if steps is None else steps.rows
