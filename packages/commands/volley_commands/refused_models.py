"""Reasons why known model types are refused, for error messages."""

from __future__ import annotations

_NO_CLASS = "sglang-jax, the rollout engine, has no class of this architecture"
_PICTURES = "it reads images or sound beside text, and Volley trains text models"
_RECURRENT = "some of its layers keep a recurrent state, which Volley's trainer does not compute"
_NOT_COMPUTED = "Volley's trainer does not compute its attention or its routing to experts"
_CODE = "transformers reads it only with code from the model's folder, which Volley does not run"

_REASONS: dict[str, tuple[str, ...]] = {
    _NO_CLASS: (
        *("apertus", "arcee", "cohere", "cohere2", "exaone", "exaone4", "ernie4_5", "ernie4_5_moe", "falcon", "gemma"),
        *("glm", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "llama4_text", "ministral", "ministral3", "mistral4", "mixtral", "nemotron", "olmo"),
        *("olmo2", "olmo3", "olmoe", "phi", "phimoe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma"),
    ),
    _PICTURES: (
        *("deepseek_vl", "gemma3", "gemma3n", "gemma4", "glm4v", "glm4v_moe", "idefics3", "internvl", "kimi_k25"),
        *("llama4", "llava", "mistral3", "mllama", "paligemma", "phi4_multimodal", "qwen2_5_omni", "qwen2_5_vl"),
        *("qwen2_vl", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    ),
    _RECURRENT: (
        *(
            "bailing_hybrid",
            "bamba",
            "falcon_h1",
            "granitemoehybrid",
            "jamba",
            "kimi_linear",
            "lfm2",
            "mamba",
            "mamba2",
        ),
        *("minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_next", "recurrent_gemma", "zamba2"),
    ),
    _NOT_COMPUTED: (
        *("deepseek_v2", "deepseek_v32", "gemma4_text", "glm4_moe", "glm_moe_dsa", "minimax_m2"),
        *("mimo_v2_flash", "phi3"),
    ),
    _CODE: ("baichuan", "bailing_moe", "chatglm", "grok-1", "internlm2", "internlm3", "mimo", "qwen", "xverse"),
}


def reason(model_type: object) -> str | None:
    """Say why a known model type is refused; None for an unknown one."""
    return next((why for why, types in _REASONS.items() if model_type in types), None)
