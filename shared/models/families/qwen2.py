"""Qwen2 and Qwen2.5 (dense)."""

from shared.models.family import Family

FAMILY = Family(
    title="Qwen2 and 2.5",
    architecture="Qwen2ForCausalLM",
    defaults={"num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768},
    neutral={"use_sliding_window": (False,)},
    written={"use_sliding_window": False},
    qkv_bias=True,
    tokenizer="Qwen2Tokenizer",
    forces_tokenizer=True,
)
