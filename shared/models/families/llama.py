"""Llama 2 and 3, and models of the same architecture such as SmolLM2."""

from shared.models.family import Family

FAMILY = Family(
    title="Llama 2 and 3 with SmolLM2",
    architecture="LlamaForCausalLM",
    defaults={"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
    neutral={"attention_bias": (False,), "use_sliding_window": (None, False)},
    written={"attention_bias": False, "mlp_bias": False},
    llama3_rope=True,
)
