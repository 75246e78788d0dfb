"""Qwen2 and Qwen2.5 (dense), on Tunix's model of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen2 import model as tunix_qwen2

from services.trainer.models.family import Remat
from shared.models.config import ModelConfig

type Qwen2 = tunix_qwen2.Qwen2


def create(model: ModelConfig, dtype: str, remat: Remat) -> Qwen2:
    """With parameters of no meaning; `dtype` is that of activations."""
    config = tunix_qwen2.ModelConfig(
        num_layers=model.num_hidden_layers,
        vocab_size=model.vocab_size,
        embed_dim=model.hidden_size,
        hidden_dim=model.intermediate_size,
        num_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        num_kv_heads=model.num_key_value_heads,
        rope_theta=model.rope_theta,  # read by Tunix's own forward pass only, which is not used
        norm_eps=model.rms_norm_eps,
        use_tied_embedding=model.tie_word_embeddings,
        remat_config=tunix_qwen2.RematConfig[remat.upper()],
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.float32,
    )
    return tunix_qwen2.Qwen2(config, rngs=nnx.Rngs(0))


def forward(model: Any, ids: jax.Array) -> jax.Array:
    """Normalized last hidden states [B, T, D] of right-padded ids int32 [B, T]."""
    length = ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))[None]
    x = model.embedder.encode(ids)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * np.float32(model.described.rope_frequencies())
    sin, cos = (turned[None].astype(x.dtype) for turned in (jnp.sin(angles), jnp.cos(angles)))  # [1, T, head_dim / 2]
    for layer in model.layers:
        _, x = layer(x, None, causal, sin, cos)
    return model.final_norm(x)
