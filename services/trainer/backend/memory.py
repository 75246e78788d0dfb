"""Memory that training takes, compared with what the devices have before anything is loaded or compiled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import jax
import orjson

from services.trainer.batches.batch import BatchLayout
from services.trainer.models.options import ModelOptions
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.planning import remedies, trainer
from shared.planning.remedies import Settings
from shared.planning.training import MemoryEstimate, Platform
from shared.process import telemetry
from shared.process.host_memory import host_limit, resident
from shared.schema import RunConfig

_log = telemetry.Log("backend")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Memory of a run's training, as `volley plan` estimates it."""

    config: RunConfig
    model: ModelConfig

    def checked(self, *, warm_start: bool) -> MemoryEstimate:
        """Estimate it; `warm_start` if the run begins with one. Raises ConfigError if the devices have less."""
        device = jax.local_devices()[0]
        platform = cast("Platform", device.platform)
        found = trainer.estimate(self.config, self.model, platform, warm_start=warm_start)
        limit, on = available(device)
        _log.info("memory", mib=found.to_mib(), limit_mib=limit >> 20, on=on)
        if found.peak > limit:
            parts = ", ".join(f"{name} {value:,.0f}" for name, value in found.to_mib().items())
            raise ConfigError(
                f"training takes {_size(found.peak)} and {on} has {_size(limit)} for it; in MiB: {parts}",
                self._fitting(platform, limit, warm_start=warm_start),
            )
        if found.peak_with_branches > limit:
            _log.warning(
                "memory does not suffice for episodes of several sequences",
                mib=found.peak_with_branches >> 20,
                limit_mib=limit >> 20,
                hint="lower trainer.train_micro_batch_size if this run has such episodes",
            )
        return found

    def _fitting(self, platform: Platform, limit: int, *, warm_start: bool) -> str:
        """Describe settings with which training fits; each has been tried."""
        loaded = LoadedConfig(self.config, orjson.loads(self.config.model_dump_json()))

        def tried(settings: Settings) -> Settings | None:
            try:
                config = remedies.with_settings(loaded, settings).config
                found = trainer.estimate(config, self.model, platform, warm_start=warm_start)
            except ConfigError:
                return None
            return settings if found.peak <= limit else None

        singles, sets = remedies.of_training(self.config), remedies.of_training_together(self.config)
        return remedies.described(remedies.ways(tried, singles, sets)) or "a smaller model, or a mesh of more devices"


def available(device: jax.Device) -> tuple[int, str]:
    """Return the bytes that training may take, and the name of the device or host that limits them.

    A device that reports no limit uses the memory of this machine or container, less what this process already has.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]), str(device)
    limit, on = host_limit()
    return limit - resident(), on


def described(model: ModelOptions, layout: BatchLayout, rows_per_step: int, memory: MemoryEstimate | None) -> str:
    """Describe mesh, memory and micro-batches in one line.

    `rows_per_step` is in sequences. Each process holds an equal share of a micro-batch.
    """
    sizes = dict(zip(model.mesh_axes, model.mesh_shape, strict=True))
    n, processes = math.prod(model.mesh_shape), jax.process_count()
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    of = f" of {processes} processes" if processes > 1 else ""
    rows = f"{rows_per_step} sequences a step, {layout.rows} a micro-batch"
    if layout.tokens is not None:
        rows = f"{rows_per_step} sequences a step, micro-batches of {layout.tokens:,} tokens"
    if processes > 1:
        share = min(sizes.get("fsdp", 1), processes)
        each = layout.rows // share if layout.tokens is None else f"{layout.tokens // share:,} tokens"
        rows += f", {each} on each process"
    size = "" if memory is None else f" {_on_each(memory)};"
    return f"mesh {mesh}: {n} {jax.devices()[0].platform} device{'s' * (n > 1)}{of};{size} {rows}"


def _on_each(memory: MemoryEstimate) -> str:
    size, branching = _size(memory.peak), _size(memory.peak_with_branches)
    return f"{size} on each" + (f" ({branching} if episodes have several sequences)" if branching != size else "")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.0f} MiB"
