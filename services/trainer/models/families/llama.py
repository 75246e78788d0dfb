"""Llama and models of its architecture, such as SmolLM2, on Tunix's Qwen2 without the biases.

google-tunix 0.1.7 has a Llama 3 of its own, but that knows no dtype of activations apart from the parameters'. Qwen2
is the same architecture with three biases more, and calls the parameters by the same names.
"""

from __future__ import annotations

from services.trainer.models.families import qwen2
from services.trainer.models.family import Remat
from shared.models.config import ModelConfig


def create(model: ModelConfig, dtype: str, remat: Remat) -> qwen2.Qwen2:
    """With parameters of no meaning; `dtype` is that of activations."""
    made = qwen2.create(model, dtype, remat)
    for layer in made.layers:
        for name in ("q_bias", "k_bias", "v_bias"):
            delattr(layer.attn, name)
    return made
