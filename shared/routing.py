"""Experts that the engine sent tokens to; the trainer sends them to the same experts.

This is rollout routing replay (R3): Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", 2025, arXiv 2510.11370. An array of experts is [n, L, k]: for n consecutive positions, the k experts
in each of L layers, uint8 for at most 256 experts, else uint16. On the wire it is flat, beside its shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shared.errors import DecodeError

_DTYPES = (np.dtype("u1"), np.dtype("<u2"))
_DIMENSIONS, _MOST = 3, 2**31


class RoutingShape(NamedTuple):
    """A model's routing: `n_layers` layers of `n_experts`, of which each token is sent to `per_token`."""

    n_layers: int
    n_experts: int
    per_token: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest dtype that holds every expert's number."""
        return next(dtype for dtype in _DTYPES if self.n_experts <= np.iinfo(dtype).max + 1)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's experts."""
        return self.n_layers * self.per_token * self.dtype.itemsize

    def check_bounds(self, routed: np.ndarray) -> None:
        """Raise DecodeError for experts [n, L, k] that this model does not have."""
        if routed.shape[1:] != (self.n_layers, self.per_token):
            raise DecodeError(
                f"experts of {routed.shape[1]} layers, {routed.shape[2]} a token, where the model has {self.n_layers} "
                f"and {self.per_token}"
            )
        if routed.size and int(routed.max()) >= self.n_experts:
            raise DecodeError(f"expert {int(routed.max())} of a model with {self.n_experts}")

    def check(self, routed: np.ndarray) -> None:
        """Raise as `check_bounds`, and for a token that was sent to one expert twice."""
        self.check_bounds(routed)
        ordered = np.sort(routed, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise DecodeError("a token was sent to the same expert twice")


def to_wire(routed: np.ndarray) -> dict[str, Any]:
    """Encode experts [n, L, k]."""
    return {"shape": list(routed.shape), "ids": routed.reshape(-1)}


def from_wire(value: Any) -> np.ndarray:
    """Decode experts [n, L, k] from `to_wire`. Raises TypeError or ValueError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected experts and their shape, got {type(value).__name__}")
    shape, ids = value["shape"], value["ids"]
    if not (
        isinstance(shape, list) and len(shape) == _DIMENSIONS and all(type(n) is int and 0 <= n < _MOST for n in shape)
    ):
        raise ValueError("the experts have an invalid shape")
    if not (isinstance(ids, np.ndarray) and ids.dtype in _DTYPES):
        raise TypeError(f"expected an array of experts, got {type(ids).__name__}")
    return ids.reshape(shape)
