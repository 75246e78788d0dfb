"""Qwen3 (dense), on Tunix's model of it."""

from __future__ import annotations

from flax import nnx
from tunix.models.qwen3 import model as tunix_qwen3

from services.trainer.models.family import Remat, tunix_sizes
from shared.models.config import ModelConfig

type Qwen3 = tunix_qwen3.Qwen3


def create(model: ModelConfig, dtype: str, remat: Remat) -> Qwen3:
    """With parameters of no meaning; `dtype` is that of activations."""
    config = tunix_qwen3.ModelConfig(**tunix_sizes(model, dtype), remat_config=tunix_qwen3.RematConfig[remat.upper()])
    return tunix_qwen3.Qwen3(config, rngs=nnx.Rngs(0))
