"""Mistral in the engine: sglang-jax's Llama with a sliding window in every layer, or in none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from sgl_jax.srt.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral for sglang-jax's model registry, which finds it by this name."""

    def __init__(self, config: Any, mesh: jax.sharding.Mesh, dtype: Any = jnp.bfloat16, **options: Any) -> None:
        super().__init__(config, mesh, dtype, **options)
        for layer in self.model.layers:
            layer.self_attn.attn.sliding_window_size = config.sliding_window
