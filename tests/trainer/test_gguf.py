"""What a GGUF file of a Llama model means, without a file: its metadata and tensors as the package gguf gives them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from services.trainer.models import gguf
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from tests.support import models

CONFIG = models.tiny_config(
    model_type="llama", architectures=["LlamaForCausalLM"], head_dim=16, num_hidden_layers=1, tie_word_embeddings=True
)
NAMES = {hf: ours for ours, hf in gguf._BLOCK.items()}


def fields(**changes: Any) -> dict[str, Any]:
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "Ċ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "Ġa", "12"]
    return {
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.block_count": 1,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.context_length": 2048,
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "llama.rope.freq_base": 100000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["Ġ a", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    } | changes


def test_the_configuration_is_the_models_and_padding_ends_no_turn() -> None:
    found = ModelConfig.parse(config := gguf.config_of(fields(), tied=True))
    assert (found.rms_norm_eps, found.rope_theta, found.head_dim) == (1e-5, 100000.0, 16)
    assert (config["eos_token_id"], config["pad_token_id"], found.tie_word_embeddings) == (2, 0, True)


def test_queries_and_keys_are_put_back_as_they_were_before_the_conversion() -> None:
    """`permute` of llama.cpp's convert_hf_to_gguf.py, undone."""
    weights = models.random_weights(CONFIG, 0)
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    for name, value in weights.items():
        if not name.startswith("model.layers.0."):
            continue
        kind = NAMES[name.removeprefix("model.layers.0.").removesuffix(".weight")]
        heads = {"attn_q": 4, "attn_k": 2}.get(kind)
        if heads is not None:
            value = value.reshape(heads, 2, len(value) // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
        tensors[f"blk.0.{kind}.weight"] = value
    found = gguf.weights_of(tensors, CONFIG)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(found[name], value.astype(ml_dtypes.bfloat16), err_msg=name)
    with pytest.raises(ConfigError, match=r"a tensor blk\.0\.ffn_gate_exps\.weight"):
        gguf.weights_of({"blk.0.ffn_gate_exps.weight": np.zeros(2)}, CONFIG)


def test_text_is_cut_as_the_model_learnt_it() -> None:
    tokenizer = gguf.tokenizer_of(fields())
    assert tokenizer.encode("b a12<|im_end|>").tokens == ["b", "Ġa", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("b a12\n").ids) == "b a12\n"
    for change in ({"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "qwen2"}):
        with pytest.raises(ConfigError, match="is of the kind"):
            gguf.tokenizer_of(fields(**change))
