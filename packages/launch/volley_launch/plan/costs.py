"""Bytes that a run moves and stores, and its price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.parameters import n_parameters, parameters
from shared.planning.serving import ITEM_SIZES
from shared.run.group_size import token_bytes
from shared.schema import RunConfig
from shared.supervised import supervised_steps
from volley_launch.training.trainer import checkpoint_bytes, has_reference

_DELTA_BYTES = 1.1
"""Bytes of a delta for each number that moved, as measured (docs/measurements.md)."""
_LARGEST_DELTA = 1 / 8
"""Share of moved numbers above which whole chunks are sent."""
_PUBLISHED_VERSIONS = 2
"""Versions that trainer and rollout servers keep as files: two, the trainer up to four while a server pulls them."""
_COMPRESSED = 0.5
"""Share of an archive's bytes that zstd leaves."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Bytes of a version that reach each rollout server, and the seconds that one copy takes at least.

    Attributes:
        whole: all weights, or all adapters.
        delta: the numbers that moved; None where versions travel whole.
        base: weights that adapters belong to, sent once.
    """

    whole: int
    delta: int | None
    base: int
    whole_s: float | None
    delta_s: float | None


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes in the run's folder.

    Attributes:
        checkpoint: one checkpoint.
        n_checkpoints: most checkpoints at once, with the one that is being written.
        base: weights that adapters belong to.
        published: files of the versions that rollout servers pull.
        archive_per_step: groups of a step whose episodes all have the full length.
        archive: of all steps.
        on_server: files of versions on each rollout server.
    """

    checkpoint: int
    n_checkpoints: int
    base: int
    published: int
    archive_per_step: int
    archive: int
    on_server: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.n_checkpoints + self.base + self.published + self.archive


@dataclass(frozen=True, slots=True)
class Cost:
    """Price of the devices, in the unit of the price table; `of_run` is None if the time of a step is not known."""

    per_hour: float
    of_run: float | None
    hours: float | None
    parts: Mapping[str, float]


def hand_over(config: RunConfig, model: ModelConfig, bandwidth: float | None, moved: float) -> HandOver | None:
    """Estimate what a version costs to send; None if the run has no rollout server.

    Args:
        bandwidth: bytes per second between the trainer and a server.
        moved: share of the weights that a step rounds to another bfloat16.
    """
    if config.is_supervised:
        return None
    lora, item = config.trainer.lora, ITEM_SIZES[config.model.dtype]
    n = n_parameters(model)
    base = 0 if lora is None else n * item
    whole = n * item
    if lora is not None:
        whole = 4 * (sum(one.n for one in parameters(model, lora.rank, lora.target_modules).values()) - n)
    has_deltas = lora is None and config.model.dtype == "bfloat16" and moved <= _LARGEST_DELTA
    delta = round(_DELTA_BYTES * moved * n) if has_deltas else None
    whole_s, delta_s = (None if bandwidth is None or one is None else one / bandwidth for one in (whole, delta))
    return HandOver(whole, delta, base, whole_s, delta_s)


def disk(config: RunConfig, model: ModelConfig, sent: HandOver | None) -> Disk:
    """Estimate the disk that a run takes at most."""
    lora, keeps = config.trainer.lora, config.trainer.checkpointing_options.max_to_keep
    with_best = 0 if config.is_supervised else 1
    with_reference = int(not config.is_supervised and has_reference(config) and lora is None)
    published = 0 if sent is None else _PUBLISHED_VERSIONS * sent.whole
    archive, n_steps = 0, steps(config) or 0
    if not config.is_supervised:
        tokens = config.trainer.groups_per_step * config.grpo_config.num_generations
        tokens *= config.rollout.engine.context_length
        archive = int(tokens * token_bytes(config, model.routing) * _COMPRESSED)
    return Disk(
        checkpoint=checkpoint_bytes(config, model),
        n_checkpoints=keeps + with_best + with_reference + 1,
        base=0 if lora is None else n_parameters(model) * ITEM_SIZES[config.model.dtype],
        published=published,
        archive_per_step=archive,
        archive=archive * n_steps,
        on_server=published + (0 if sent is None else sent.base),
    )


def steps(config: RunConfig) -> int | None:
    """Steps of the run; None if they depend on the number of conversations."""
    found = supervised_steps(config) if config.is_supervised else None
    return config.trainer.max_steps if found is None else found.n_steps


def cost(
    devices: Sequence[tuple[str, str, int]], prices: Mapping[str, float], n_steps: int | None, step_s: float | None
) -> Cost:
    """Compute the price of `devices`, by part of the run, device's name and number.

    Raises ConfigError for a device without a price.
    """
    parts: dict[str, float] = {}
    for part, name, n in devices:
        if name.lower() not in prices:
            raise ConfigError(
                f"the price table has no {name}", f"add a line `{name}: PRICE`, per device and hour, or leave it out"
            )
        parts[part] = n * prices[name.lower()]
    per_hour = sum(parts.values())
    hours = None if n_steps is None or step_s is None else n_steps * step_s / 3600
    return Cost(per_hour, None if hours is None else per_hour * hours, hours, parts)
