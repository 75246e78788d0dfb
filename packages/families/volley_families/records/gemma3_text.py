"""Gemma 3, text only.

Source: Gemma Team, "Gemma 3 Technical Report", 2025, and transformers' `modeling_gemma3`.
"""

from shared.models.family import FULL, SLIDING, Family

FAMILY = Family(
    title="Gemma 3 (text)",
    architecture="Gemma3ForCausalLM",
    defaults={"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072},
    neutral={
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "tie_word_embeddings": (True,),
        "use_bidirectional_attention": (False, None),
    },
    written={"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    engine_names={
        f"self_attn.{norm}.scale": f"self_attn.rotary_emb.{norm}.weight" for norm in ("q_norm", "k_norm")
    },  # and those of Gemma 2
    qk_norm=True,
    tied=True,
    scaled_embeddings=True,
    norms_add_one=True,
    output_norms=True,
    activation="gelu_pytorch_tanh",
    rope_theta=1e6,
    attention={
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_local_base_freq": 10_000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    layer_types=(SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL),
    tokenizer="GemmaTokenizer",
)
