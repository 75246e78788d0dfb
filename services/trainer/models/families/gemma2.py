"""Gemma 2, on the parts of Tunix's Qwen2, which are put together another way.

google-tunix 0.1.7 has a Gemma of its own, but that knows no dtype of activations apart from the parameters', always
turns by θ = 1e4 and divides scores by √head_dim, whatever the configuration says, and calls its parameters otherwise.

Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024, and transformers'
`modeling_gemma2`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen2 import model as tunix_qwen2

from services.trainer.models.attention import ScoreOptions
from services.trainer.models.families import llama, qwen2
from services.trainer.models.family import Remat
from shared.models.config import ModelConfig


class ScaledEmbedder(tunix_qwen2.Embedder):
    """Embeddings times √D, rounded to the activations' dtype."""

    def encode(self, x: Any) -> jax.Array:
        found = super().encode(x)
        return found * jnp.asarray(math.sqrt(found.shape[-1]), found.dtype)


class OffsetNorm(tunix_qwen2.RMSNorm):
    """Multiplies by 1 + w, in float32."""

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.astype(x, jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + self.norm_eps)
        return jnp.astype(normed * (1 + jnp.astype(self.w.get_value(), jnp.float32)), self.dtype)


class GeluMLP(tunix_qwen2.MLP):
    """With the tanh approximation of GELU where Qwen has SiLU."""

    def block(self, x: jax.Array) -> jax.Array:
        activations = nnx.gelu(self.gate_proj(x), approximate=True) * self.up_proj(x)
        return self.down_proj(tunix_qwen2.shard(activations, self.shd_config.act_btf))


def create(model: ModelConfig, dtype: str, remat: Remat) -> qwen2.Qwen2:
    """With parameters of no meaning; `dtype` is that of activations."""
    gemma = model.gemma2
    assert gemma is not None
    made: Any = llama.create(model, dtype, remat)
    rngs, types = nnx.Rngs(0), {"dtype": made.config.dtype, "param_dtype": jnp.float32}
    shardings = made.config.shd_config

    def norm() -> OffsetNorm:
        return OffsetNorm(model.hidden_size, norm_eps=model.rms_norm_eps, shd_config=shardings, **types)

    made.embedder = ScaledEmbedder(model.vocab_size, model.hidden_size, rngs=rngs, shd_config=shardings, **types)
    made.final_norm = norm()
    for i, layer in enumerate(made.layers):
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(layer, f"{name}_layernorm", norm())
        layer.mlp = GeluMLP(made.config, rngs=rngs)
        layer.attn.scores = ScoreOptions(
            scale=gemma.query_pre_attn_scalar**-0.5, softcap=gemma.attn_logit_softcapping, window=gemma.window(i)
        )
    return made
