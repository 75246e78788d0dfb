"""Experts of the tokens in the key/value pool, stored by slot like keys and values.

A cached prefix brings its experts with it. sglang-jax has such a buffer too (`enable_return_routed_experts`), of int32
and read once, when a request ends. Positions that later weights have computed again would then have other experts than
those that sampled the tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.routing import RoutingShape


class RoutingPool:
    """Experts by slot. Invariant: they are of the step that wrote the slot's keys and values.

    Args: n_slots: of the key/value pool.
    """

    def __init__(self, n_slots: int, shape: RoutingShape) -> None:
        self._experts_SLK = np.zeros((n_slots, shape.n_layers, shape.per_token), shape.dtype)

    def write(self, batch: Any, experts_TLK: np.ndarray) -> None:
        """Store the experts of a step's tokens; padding comes last and is skipped."""
        n = batch.get_original_input_len()
        self._experts_SLK[batch.out_cache_loc[:n]] = experts_TLK[:n]

    def of(self, slots: np.ndarray) -> np.ndarray:
        """Return a copy of the experts [n, L, k] of slots int [n]."""
        return self._experts_SLK[slots]


def routing_of(config: Any) -> RoutingShape | None:
    """Return the routing shape of the engine's model configuration; None for a dense model."""
    n_experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    if not n_experts:
        return None
    n_layers = config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
    return RoutingShape(n_layers, n_experts, config.num_experts_per_tok) if n_layers > 0 else None
