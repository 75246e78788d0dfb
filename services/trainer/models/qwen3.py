"""Qwen3 (dense), on Tunix's model of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3 import model as tunix_qwen3

from services.trainer.models import attention
from services.trainer.models.attention import Packing
from services.trainer.models.family import Remat, tunix_sizes
from shared.models.config import ModelConfig

type Qwen3 = tunix_qwen3.Qwen3
_TUNIX_ROPE_THETA = 1_000_000.0


def create(model: ModelConfig, dtype: str, remat: Remat) -> Qwen3:
    """With parameters of no meaning; `dtype` is that of activations."""
    config = tunix_qwen3.ModelConfig(**tunix_sizes(model, dtype), remat_config=tunix_qwen3.RematConfig[remat.upper()])
    return tunix_qwen3.Qwen3(config, rngs=nnx.Rngs(0))


@jax.tree_util.register_pytree_node_class
class _Positions:
    """Positions [B, T] that make Tunix's rotary embedding turn by *our* frequencies.

    google-tunix 0.1.7 ignores `rope_theta` and always divides `positions[..., None]` by 1e6^(2i/d). This stands in for
    the positions array and answers that one indexing with positions * frequency * 1e6^(2i/d), so that the quotient is
    positions * frequency. Nothing of Tunix is patched.
    """

    def __init__(self, scaled: jax.Array) -> None:
        self._scaled = scaled

    @classmethod
    def of(cls, positions: jax.Array, frequencies: np.ndarray) -> _Positions:
        exponent = np.arange(len(frequencies)) / len(frequencies)
        scale = np.asarray(frequencies * _TUNIX_ROPE_THETA**exponent, np.float32)
        return cls(positions.astype(jnp.float32)[..., None] * scale)

    def __getitem__(self, index: Any) -> jax.Array:
        if index != (Ellipsis, None):
            raise TypeError(
                f"unexpected use of positions: [{index!r}]; this Tunix is not the version this was written for"
            )
        return self._scaled

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        return (self._scaled,), None

    @classmethod
    def tree_unflatten(cls, _aux: None, children: tuple[jax.Array]) -> _Positions:
        return cls(*children)


def forward(model: Any, ids: jax.Array, packing: Packing | None = None) -> jax.Array:
    """Normalized last hidden states [B, T, D] of ids int32 [B, T], right-padded or packed."""
    mask = attention.visible(ids, packing)
    positions = _Positions.of(attention.positions(ids, packing), model.described.rope_frequencies())
    x = model.embedder.encode(ids)
    for layer in model.layers:
        _, x = layer(x, positions, None, mask)
    return model.final_norm(x)
