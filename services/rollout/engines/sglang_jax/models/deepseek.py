"""DeepSeek-V3 in the engine: sglang-jax's, without the experts of tokens, which its dense layers do not have."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.models import deepseek_v3


class DeepseekV3ForCausalLM(deepseek_v3.DeepseekV3ForCausalLM):
    """DeepSeek-V3 for sglang-jax's model registry, which finds it by this name."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, None]:
        """Compute a step as sglang-jax's class does; no routing is reported."""
        output, pools, flags, _ = super().__call__(*args, **kwargs)
        return output, pools, flags, None
