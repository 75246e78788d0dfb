"""Model classes that sglang-jax lacks, or that differ from its own, made of its parts: one file for each family."""

from volley_families.engine.deepseek import DeepseekV3ForCausalLM
from volley_families.engine.gemma3 import Gemma3ForCausalLM
from volley_families.engine.mistral import MistralForCausalLM

CLASSES = (DeepseekV3ForCausalLM, Gemma3ForCausalLM, MistralForCausalLM)
