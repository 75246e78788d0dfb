"""Memory that training takes, by the estimate of an installed package, and a line that describes the training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import jax

from services.trainer.batches.batch import BatchLayout
from services.trainer.models.options import ModelOptions
from shared import packages
from shared.models.config import ModelConfig
from shared.schema import RunConfig

_MIB = 2**20


class MemoryNeed(Protocol):
    """Estimate of the bytes on each device; `peak_with_branches` if episodes have several sequences."""

    @property
    def peak(self) -> int: ...

    @property
    def peak_with_branches(self) -> int: ...

    def to_mib(self) -> Mapping[str, float]:
        """Return the parts of the largest phase in MiB."""
        ...


class PlannedMemory(Protocol):
    """Memory of a run's training."""

    def checked(self, *, warm_start: bool) -> MemoryNeed:
        """Estimate it; `warm_start` if the run begins with one. Raises ConfigError if the devices have less."""
        ...


def training_memory(config: RunConfig, model: ModelConfig) -> PlannedMemory | None:
    """Return the memory of the run's training; None if no package estimates it."""
    estimated = packages.part("training_memory", required=False)
    return None if estimated is None else estimated(config, model)


def described(model: ModelOptions, layout: BatchLayout, rows_per_step: int, memory: MemoryNeed | None) -> str:
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


def _on_each(memory: MemoryNeed) -> str:
    size, branching = _size(memory.peak), _size(memory.peak_with_branches)
    return f"{size} on each" + (f" ({branching} if episodes have several sequences)" if branching != size else "")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.0f} MiB"
