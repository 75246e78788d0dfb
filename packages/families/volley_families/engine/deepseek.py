"""DeepSeek-V3 in the engine: sglang-jax's, which reports experts of its dense layers as None."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.models import deepseek_v3


class DeepseekV3ForCausalLM(deepseek_v3.DeepseekV3ForCausalLM):
    """DeepSeek-V3 for sglang-jax's model registry, which finds it by this name."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, list[Any] | None]:
        """Compute a step as sglang-jax's class does; report the experts of the layers that have some."""
        output, pools, flags, experts = super().__call__(*args, **kwargs)
        return output, pools, flags, [of_layer for of_layer in experts if of_layer is not None] or None
