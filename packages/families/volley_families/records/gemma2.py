"""Gemma 2.

Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024, and transformers'
`modeling_gemma2`.
"""

from shared.models.family import FULL, SLIDING, Family

FAMILY = Family(
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    defaults={"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192},
    neutral={
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "tie_word_embeddings": (True,),
        "use_bidirectional_attention": (None, False),
    },
    written={"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"},
    engine_names={"norm.scale": "norm.weight"},
    tied=True,
    scaled_embeddings=True,
    norms_add_one=True,
    output_norms=True,
    activation="gelu_pytorch_tanh",
    attention={
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    layer_types=(SLIDING, FULL),
    tokenizer="GemmaTokenizer",
)
