"""Shapes of a micro-batch, with which a step is compiled before there is data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from services.trainer.batches.batch import micro_batches, routed_dtype, supervised_row
from services.trainer.learner.policy import PolicyOptions
from services.trainer.models.options import ModelOptions
from shared.models.config import ModelConfig


def micro_batch(described: ModelConfig, model: ModelOptions, policy: PolicyOptions, n_rows: int) -> Any:
    """Make a micro-batch of `n_rows` of the longest bucket, as shapes."""
    needs, length = policy.algorithm.needs, policy.layout.buckets[-1]
    row, some = supervised_row([0] * length, [1] * length), np.zeros(length, np.float32)
    row = replace(row, reference=some if needs.reference else None, old=some if needs.old else None)
    row = replace(row, values=some, returns=some) if needs.values else row
    row = replace(row, observed=some) if needs.observations else row
    row = replace(row, staleness=some) if needs.staleness else row
    rows = [row] * max(1, n_rows)
    layout = replace(policy.layout, rows=len(rows), shards=1)
    layout = replace(layout, tokens=len(rows) * length) if layout.tokens else layout
    batch = max(micro_batches(rows, np.ones(len(rows)), layout, 1), key=lambda one: one.ids.size)
    shapes: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    if described.routing is None or not model.routing_replay:
        return shapes
    n_layers, _, k = described.routing
    routed = jax.ShapeDtypeStruct((*batch.ids.shape, n_layers, k), routed_dtype(described.routing.dtype))
    return replace(shapes, routed=routed)
