"""Qwen3 (dense), on Tunix's model of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3 import model as tunix_qwen3

from services.trainer.models.family import Remat
from shared.models.config import ModelConfig

type Qwen3 = tunix_qwen3.Qwen3
_TUNIX_ROPE_THETA = 1_000_000.0


def create(model: ModelConfig, dtype: str, remat: Remat) -> Qwen3:
    """With parameters of no meaning; `dtype` is that of activations."""
    config = tunix_qwen3.ModelConfig(
        num_layers=model.num_hidden_layers,
        vocab_size=model.vocab_size,
        embed_dim=model.hidden_size,
        hidden_dim=model.intermediate_size,
        num_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        num_kv_heads=model.num_key_value_heads,
        rope_theta=model.rope_theta,  # declared int, and unused by Tunix
        norm_eps=model.rms_norm_eps,
        use_tied_embedding=model.tie_word_embeddings,
        remat_config=tunix_qwen3.RematConfig[remat.upper()],
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.float32,
    )
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


def forward(model: Any, ids: jax.Array) -> jax.Array:
    """Normalized last hidden states [B, T, D] of right-padded ids int32 [B, T]."""
    length = ids.shape[1]
    positions = _Positions.of(jnp.arange(length)[None], model.described.rope_frequencies())
    causal = jnp.tril(jnp.ones((length, length), bool))[None]
    x = model.embedder.encode(ids)
    for layer in model.layers:
        _, x = layer(x, positions, None, causal)
    return model.final_norm(x)
