"""Qwen2 and Qwen2.5 (dense), on Tunix's model of them."""

from __future__ import annotations

from flax import nnx
from tunix.models.qwen2 import model as tunix_qwen2

from services.trainer.models.family import Remat, tunix_sizes
from shared.models.config import ModelConfig

type Qwen2 = tunix_qwen2.Qwen2


def create(model: ModelConfig, dtype: str, remat: Remat) -> Qwen2:
    """With parameters of no meaning; `dtype` is that of activations."""
    config = tunix_qwen2.ModelConfig(**tunix_sizes(model, dtype), remat_config=tunix_qwen2.RematConfig[remat.upper()])
    return tunix_qwen2.Qwen2(config, rngs=nnx.Rngs(0))
