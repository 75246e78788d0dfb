"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with a mixture of experts and one shared expert in every layer."""

from shared.models.family import Family

_SHARED = {
    f"mlp.shared_expert.{one}.kernel": f"mlp.shared_expert.{one}.weight"
    for one in ("gate_proj", "up_proj", "down_proj")
}

FAMILY = Family(
    title="Qwen1.5-MoE and Qwen2-MoE",
    architecture="Qwen2MoeForCausalLM",
    defaults={"num_key_value_heads": 16, "head_dim": None, "max_position_embeddings": 32768},
    neutral={
        "qkv_bias": (True,),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": (None, []),
    },
    written={"qkv_bias": True, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    names={**_SHARED, "mlp.shared_expert_gate.kernel": "mlp.shared_expert_gate.weight"},
    qkv_bias=True,
    experts={
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    tokenizer="Qwen2Tokenizer",
)
