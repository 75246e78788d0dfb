"""Model classes that sglang-jax lacks, or that differ from its own, made of its parts: one file for each family."""

from __future__ import annotations


def register() -> None:
    """Let sglang-jax find these classes by the `architectures` of a config.json."""
    from sgl_jax.srt.models.registry import ModelRegistry

    from services.rollout.engines.sglang_jax.models.deepseek import DeepseekV3ForCausalLM
    from services.rollout.engines.sglang_jax.models.gemma3 import Gemma3ForCausalLM
    from services.rollout.engines.sglang_jax.models.mistral import MistralForCausalLM

    ModelRegistry.models |= {
        one.__name__: one for one in (DeepseekV3ForCausalLM, Gemma3ForCausalLM, MistralForCausalLM)
    }
