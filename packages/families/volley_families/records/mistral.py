"""Mistral (dense, text only).

Source: Jiang et al., "Mistral 7B", 2023, and transformers' `modeling_mistral`.
"""

from shared.models.family import SLIDING, Family

FAMILY = Family(
    title="Mistral",
    architecture="MistralForCausalLM",
    defaults={"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072},
    neutral={"attention_bias": (False,)},
    written={},
    attention={"sliding_window": 4096},
    layer_types=(SLIDING,),
)
