"""Model classes that sglang-jax lacks, made of its own: one file for each family."""

from __future__ import annotations


def register() -> None:
    """Let sglang-jax find these classes by the `architectures` of a config.json."""
    from sgl_jax.srt.models.registry import ModelRegistry

    from services.rollout.engines.sglang_jax.models.gemma3 import Gemma3ForCausalLM
    from services.rollout.engines.sglang_jax.models.mistral import MistralForCausalLM

    ModelRegistry.models |= {one.__name__: one for one in (Gemma3ForCausalLM, MistralForCausalLM)}
