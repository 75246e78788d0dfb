"""Memory that training takes, compared with what the devices have before anything is loaded or compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import orjson

from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.planning.serving import Platform
from shared.process import telemetry
from shared.process.host_memory import host_limit, resident
from shared.schema import RunConfig
from volley_launch.training import remedies, trainer
from volley_launch.training.memory import MemoryEstimate
from volley_launch.training.remedies import Settings

_log = telemetry.Log("backend")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Memory of a run's training, as `volley plan` estimates it (part `training_memory`)."""

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


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.0f} MiB"
