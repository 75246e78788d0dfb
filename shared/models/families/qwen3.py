"""Qwen3 (dense)."""

from shared.models.family import Family

FAMILY = Family(
    title="dense Qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    neutral={"attention_bias": (False,), "use_sliding_window": (False,)},
    written={"attention_bias": False, "use_sliding_window": False},
    qk_norm=True,
    tokenizer="Qwen2Tokenizer",
)
