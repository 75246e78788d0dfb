"""The model families that trainer and engine compute, by the `model_type` of a config.json: what their configurations
leave to defaults, and which keys must keep the value that is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    Attributes:
        architecture: the class of transformers, and of sglang-jax.
        defaults: sizes where the key is absent; `num_key_value_heads` None is that of the queries, `head_dim` None is
            hidden_size / num_attention_heads.
        neutral: keys of this family alone, with the values under which they do not change what is computed.
        written: what a config.json of ours says beside the sizes.
        qkv_bias: the projections to queries, keys and values have a bias.
        qk_norm: queries and keys are normalized by head.
        llama3_rope: `rope_type` "llama3" is computed.
        experts: every layer's feed-forward part is a mixture of experts.
        gemma2: embeddings are scaled by √hidden_size and always tied, norms multiply by 1 + weight, and what attention
            and feed-forward part give is normalized too; what its numbers are says `config.Gemma2`.
        activation: of the feed-forward part.
        tokenizer: class of transformers 5 that reads a tokenizer whose class no file names.
        forces_tokenizer: it reads every tokenizer, whatever class a file names.
    """

    architecture: str
    defaults: Mapping[str, int | None]
    neutral: Mapping[str, tuple[Any, ...]]
    written: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    llama3_rope: bool = False
    experts: bool = False
    gemma2: bool = False
    activation: str = "silu"
    tokenizer: str = "PreTrainedTokenizerFast"
    forces_tokenizer: bool = False


# Defaults are those of the configuration classes of transformers 4.51 to 5.12.
FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(
        "Qwen3ForCausalLM",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        neutral={"attention_bias": (False,), "use_sliding_window": (False,)},
        written={"attention_bias": False, "use_sliding_window": False},
        qk_norm=True,
        tokenizer="Qwen2Tokenizer",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        defaults={"num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 32768},
        neutral={
            "attention_bias": (False,),
            "use_sliding_window": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": (None, []),
        },
        written={
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        qk_norm=True,
        tokenizer="Qwen2Tokenizer",
        experts=True,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        defaults={"num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768},
        neutral={"use_sliding_window": (False,)},
        written={"use_sliding_window": False},
        qkv_bias=True,
        tokenizer="Qwen2Tokenizer",
        forces_tokenizer=True,
    ),
    "llama": Family(
        "LlamaForCausalLM",
        defaults={"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
        neutral={"attention_bias": (False,), "use_sliding_window": (None, False)},
        written={"attention_bias": False, "mlp_bias": False},
        llama3_rope=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        defaults={"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192},
        neutral={
            "hidden_act": ("gelu_pytorch_tanh",),
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "tie_word_embeddings": (True,),
            "use_bidirectional_attention": (None, False),
        },
        written={"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"},
        gemma2=True,
        activation="gelu_pytorch_tanh",
        tokenizer="GemmaTokenizer",
    ),
}
NAMES = (
    "dense Qwen3 (model_type qwen3), Qwen3-MoE (qwen3_moe), Qwen2 and 2.5 (qwen2), Llama 2 and 3 with SmolLM2 (llama),"
    " Gemma 2 (gemma2)"
)
"""For sentences."""
