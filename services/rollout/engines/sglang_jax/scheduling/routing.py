"""Which experts the tokens in the key/value pool were sent to, by slot, as their keys and values are: a prefix that is
cached brings its experts with it.

The engine has such a buffer of its own (`enable_return_routed_experts`), of int32 and read once, when a request ends:
what was computed again since then, by later weights, would stand for what sampled its tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.routing import RoutingShape


class RoutingPool:
    """Invariant: a slot tells of the step that wrote its keys and values. Args: n_slots: of the key/value pool."""

    def __init__(self, n_slots: int, shape: RoutingShape) -> None:
        self._experts_SLK = np.zeros((n_slots, shape.n_layers, shape.per_token), shape.dtype)

    def write(self, batch: Any, experts_TLK: np.ndarray) -> None:
        """Of the tokens of a step, those that fill its shape up last."""
        n = batch.get_original_input_len()
        self._experts_SLK[batch.out_cache_loc[:n]] = experts_TLK[:n]

    def of(self, slots: np.ndarray) -> np.ndarray:
        """[n, L, k] of slots int [n]; a copy."""
        return self._experts_SLK[slots]


def routing_of(config: Any) -> RoutingShape | None:
    """Of the configuration that the engine's model was made of; None of a dense one."""
    n_experts = getattr(config, "num_experts", None)
    return n_experts and RoutingShape(config.num_hidden_layers, n_experts, config.num_experts_per_tok)
