"""Gemma 3 (text) in the engine: sglang-jax's Gemma 2 with norms of queries and keys, and θ by type of layer.

Source: transformers' `modeling_gemma3`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from sgl_jax.srt.layers.embeddings import RotaryEmbedding
from sgl_jax.srt.layers.layernorm import GemmaRMSNorm
from sgl_jax.srt.models.gemma2 import Gemma2ForCausalLM
from sgl_jax.srt.utils.weight_utils import WeightMapping


class _NormedRotary(nnx.Module):
    """Norms of queries and keys by head, then rotary positions: called as Gemma 2 calls its rotary embedding."""

    def __init__(self, config: Any, theta: float, dtype: Any) -> None:
        self.q_norm, self.k_norm = (GemmaRMSNorm(config.head_dim, epsilon=config.rms_norm_eps) for _ in range(2))
        self.rotary = RotaryEmbedding(
            head_size=config.head_dim,
            rotary_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            base=theta,  # pyrefly: ignore[bad-argument-type]  # computed in floats
            is_neox_style=True,
            dtype=dtype,
        )

    def __call__(self, positions: jax.Array, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """q, k: [T, heads, H]."""
        normed: Any = (self.q_norm(q), self.k_norm(k))  # without a residual each returns one array
        return self.rotary(positions, *normed)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3 for sglang-jax's model registry, which finds it by this name."""

    def __init__(self, config: Any, mesh: jax.sharding.Mesh, dtype: Any = jnp.bfloat16) -> None:
        super().__init__(config, mesh, dtype)
        for layer, kind in zip(self.model.layers, config.layer_types, strict=True):
            theta = config.rope_theta if kind == "full_attention" else config.rope_local_base_freq
            attention: Any = layer.self_attn
            attention.rotary_emb = nnx.data(_NormedRotary(config, theta, dtype))

    def _create_layer_mappings(self, layer_idx: int) -> dict[str, WeightMapping]:
        """Gemma 2's tensors, and the norms of queries and keys."""
        attention = f"model.layers.{layer_idx}.self_attn"
        return super()._create_layer_mappings(layer_idx) | {
            f"{attention}.{norm}.weight": WeightMapping(
                target_path=f"{attention}.rotary_emb.{norm}.weight", sharding=(None,), transpose=False
            )
            for norm in ("q_norm", "k_norm")
        }
