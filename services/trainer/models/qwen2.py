"""Qwen2 and Qwen2.5 (dense), on Tunix's model of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen2 import model as tunix_qwen2

from services.trainer.models import attention
from services.trainer.models.attention import Packing
from services.trainer.models.family import Remat, tunix_sizes
from shared.models.config import ModelConfig

type Qwen2 = tunix_qwen2.Qwen2


def create(model: ModelConfig, dtype: str, remat: Remat) -> Qwen2:
    """With parameters of no meaning; `dtype` is that of activations."""
    config = tunix_qwen2.ModelConfig(**tunix_sizes(model, dtype), remat_config=tunix_qwen2.RematConfig[remat.upper()])
    return tunix_qwen2.Qwen2(config, rngs=nnx.Rngs(0))


def forward(model: Any, ids: jax.Array, packing: Packing | None = None) -> jax.Array:
    """Normalized last hidden states [B, T, D] of ids int32 [B, T], right-padded or packed."""
    positions, mask = attention.positions(ids, packing), attention.visible(ids, packing)
    x = model.embedder.encode(ids)
    angles = positions[..., None].astype(jnp.float32) * np.float32(model.described.rope_frequencies())
    sin, cos = (turned.astype(x.dtype) for turned in (jnp.sin(angles), jnp.cos(angles)))  # [B or 1, T, head_dim / 2]
    for layer in model.layers:
        _, x = layer(x, None, mask, sin, cos)
    return model.final_norm(x)
