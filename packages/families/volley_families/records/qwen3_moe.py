"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from shared.models.family import Family

FAMILY = Family(
    title="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    defaults={"num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 32768},
    neutral={
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": (None, []),
    },
    written={"attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    engine_names={".o_proj.": ".c_proj."},
    qk_norm=True,
    experts={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    tokenizer="Qwen2Tokenizer",
)
