"""One-line description of the training setup: mesh, memory, and micro-batches."""

from __future__ import annotations

import math

import jax

from services.trainer.batches.batch import BatchLayout
from services.trainer.models.options import ModelOptions
from shared.planning.training import MemoryEstimate

_MIB = 2**20


def plan(model: ModelOptions, layout: BatchLayout, rows_per_step: int, memory: MemoryEstimate) -> str:
    """Describe the setup; `rows_per_step` is in sequences. Each process holds an equal share of a micro-batch."""
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
    size, branching = _size(memory.peak), _size(memory.peak_with_branches)
    size += f" on each ({branching} if episodes have several sequences)" if branching != size else " on each"
    return f"mesh {mesh}: {n} {jax.devices()[0].platform} device{'s' * (n > 1)}{of}; {size}; {rows}"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.0f} MiB"
