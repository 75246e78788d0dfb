"""DeepSeek-V3's architecture, as in Moonlight: latent attention, shared experts, and groups of experts.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, and transformers' `modeling_deepseek_v3`.
"""

from shared.models.family import Family

_LINEAR = {
    f"attn.{name}.kernel": f"self_attn.{name}.weight"
    for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
}
_SHARED = {
    f"mlp.shared_experts.{name}.kernel": f"mlp.shared_experts.{name}.weight"
    for name in ("gate_proj", "up_proj", "down_proj")
}

FAMILY = Family(
    title="DeepSeek-V3 and Moonlight",
    architecture="DeepseekV3ForCausalLM",
    defaults={"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 4096},
    neutral={
        "attention_bias": (False,),
        "tie_word_embeddings": (False,),
        "rope_interleave": (True,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "auto_map": (),  # code of before transformers had this class
    },
    written={
        "attention_bias": False,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "output_router_logits": False,
    },
    names={
        **_LINEAR,
        **_SHARED,
        "attn.q_a_layernorm.w": "self_attn.q_a_layernorm.weight",
        "attn.kv_a_layernorm.w": "self_attn.kv_a_layernorm.weight",
        "mlp.router_bias": "mlp.gate.e_score_correction_bias",
    },
    untrained=("mlp.router_bias",),
    experts={
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    latent={
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
)
