"""What config.json of each family means, and the numpy reference of the tests, against transformers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shared.errors import ConfigError
from shared.models import names
from shared.models.config import ModelConfig
from shared.models.family_parts import AttentionConfig, Experts
from tests.support import decoder_reference, families, models

GEMMA = families.case("gemma2").written
LLAMA = families.case("llama-scaled").written
DEEPSEEK = families.case("deepseek-v3").written
QWEN2_MOE = families.case("qwen2-moe").written
MISTRAL = families.case("mistral-windowed").written
MOE = families.case("qwen3-moe").written
QWEN2 = families.case("qwen2").written
SCALED = LLAMA["rope_parameters"]


@pytest.mark.parametrize("name", families.NAMES)
def test_the_reference_computes_what_transformers_computes(name: str) -> None:
    case = families.case(name)
    found = decoder_reference.score(case.weights, case.config, case.ids[:1].tolist(), case.ids[1:].tolist())
    np.testing.assert_allclose(found, case.logprobs, atol=5e-6)


@pytest.mark.parametrize("name", families.NAMES)
def test_what_is_written_is_read_as_the_same(name: str) -> None:
    case = families.case(name)
    model = ModelConfig.parse(case.written)
    assert ModelConfig.parse(json.loads(json.dumps(model.to_hf()))) == model
    assert model.model_type == case.written["model_type"]


@pytest.mark.parametrize("name", families.NAMES)
def test_names_and_orientation_of_every_tensor_are_those_of_both_sides(name: str) -> None:
    case = families.case(name)
    theirs = models.to_tunix(case.weights, case.config)
    n_experts = case.config.get("num_experts") or case.config.get("n_routed_experts", 0)
    made: set[str] = set()
    for leaf, value in theirs.items():
        if names.is_experts(leaf):
            files = names.in_files(names.hf_name(leaf), n_experts)
            made |= set(files)
            assert [names.of_expert(name) for name in files] == [(names.hf_name(leaf), i) for i in range(n_experts)]
            for i, name in enumerate(files):
                np.testing.assert_array_equal(names.to_hf(leaf, value)[i], case.weights[name])
                np.testing.assert_array_equal(names.from_hf(leaf, case.weights[name], value.shape[1:]), value[i])
            continue
        made.add(names.hf_name(leaf))
        assert names.is_leaf(leaf)
        np.testing.assert_array_equal(names.to_hf(leaf, value), case.weights[names.hf_name(leaf)], err_msg=leaf)
        np.testing.assert_array_equal(names.from_hf(leaf, case.weights[names.hf_name(leaf)], value.shape), value)
    assert made == case.weights.keys()
    assert not names.is_leaf("model.norm.weight")


def test_defaults_are_those_of_transformers() -> None:
    """Printed by `LlamaConfig()` and `Qwen2Config()` of transformers 4.57 and 5.23."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
    }
    llama, qwen2 = (ModelConfig.parse({"model_type": name, **sizes}) for name in ("llama", "qwen2"))
    assert (llama.head_dim, llama.num_key_value_heads, llama.max_position_embeddings) == (2, 32, 2048)
    assert (qwen2.head_dim, qwen2.num_key_value_heads, qwen2.max_position_embeddings) == (2, 32, 32768)
    for model in (llama, qwen2):
        assert (model.rope_theta, model.rms_norm_eps, model.tie_word_embeddings) == (10000.0, 1e-6, False)
    assert ModelConfig.parse({"model_type": "llama", **sizes, "head_dim": None}) == llama


def test_experts_are_read_from_both_spellings_and_refused_where_they_are_not_computed() -> None:
    """transformers 5 writes num_local_experts, 4 num_experts; defaults are those of `Qwen3MoeConfig()` of both."""
    plain = {k: v for k, v in MOE.items() if k != "num_local_experts"}
    model = ModelConfig.parse(MOE)
    assert model.experts == Experts(6, 2, 32, norm_topk_prob=True)
    assert model == ModelConfig.parse(plain | {"num_experts": 6})
    assert model.difference(ModelConfig.parse(MOE | {"norm_topk_prob": False})) == "experts"
    few = {
        k: v for k, v in plain.items() if k not in ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    }
    assert ModelConfig.parse(few).experts == Experts(128, 8, 768, norm_topk_prob=False)
    for change, named in (
        ({"num_experts": 7}, "num_experts and num_local_experts differ"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_experts=6"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers="),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
    ):
        with pytest.raises(ConfigError, match=named):
            ModelConfig.parse(MOE | change)


def test_gemma_2_as_it_is_published() -> None:
    """The config.json of google/gemma-2-2b-it; defaults are those of `Gemma2Config()` of transformers 4.57 and 5.23."""
    published = {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 256000,
    }
    model = ModelConfig.parse(published)
    assert model.attention == AttentionConfig(256, 4096, ("sliding_attention", "full_attention") * 13, 50.0, 30.0)
    assert model.tie_word_embeddings
    assert [model.attention.window(layer) for layer in (0, 1, 25)] == [4096, None, None]
    few = {k: v for k, v in published.items() if k in ("model_type", "eos_token_id") or k.endswith("size")}
    sizes = {"num_hidden_layers": 26, "num_attention_heads": 8}
    assert ModelConfig.parse(few | sizes) == model
    assert model.difference(ModelConfig.parse(published | {"attn_logit_softcapping": None})) == "attention"


def test_gemma_3_as_it_is_published() -> None:
    """The config.json of google/gemma-3-1b-it, and how transformers 5.24 writes the same."""
    published = {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    }
    model = ModelConfig.parse(published)
    assert model.attention is not None
    assert [model.attention.window(layer) for layer in (0, 4, 5, 6, 25)] == [512, 512, None, 512, 512]
    assert [model.attention.theta(layer) for layer in (4, 5)] == [10000.0, None]
    assert (model.rope_theta, model.tie_word_embeddings) == (1e6, True)
    thetas = {"rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"}
    plain = {key: value for key, value in published.items() if key not in thetas}
    assert ModelConfig.parse(plain) == model
    default = {"rope_type": "default"}
    by_type = {"full_attention": default | {"rope_theta": 1e6}, "sliding_attention": default | {"rope_theta": 1e4}}
    assert ModelConfig.parse(plain | {"rope_parameters": by_type}) == model
    assert ModelConfig.parse(plain | {"rope_parameters": {"full_attention": default}}) == model
    for change, named in (
        ({"rope_parameters": default}, "rope_parameters="),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, "rope_type='linear'"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "rope_parameters.sliding_attention"),
        ({"rope_parameters": by_type, "rope_local_base_freq": 5.0}, "several values of rope_local_base_freq"),
        ({"rope_parameters": by_type, "rope_theta": 5.0}, "several values of θ"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_type='linear'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ):
        with pytest.raises(ConfigError) as error:
            ModelConfig.parse(plain | change)
        assert named in str(error.value)


def test_mistral_has_a_window_in_every_layer_or_none() -> None:
    """transformers takes a window of 4096 where config.json has no such key."""
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    windows = []
    for config in (MISTRAL, absent, absent | {"sliding_window": None}):
        attention = ModelConfig.parse(config).attention
        assert attention is not None
        windows.append([attention.window(layer) for layer in range(2)])
    assert windows == [[9, 9], [4096, 4096], [None, None]]
    assert "layer_types" not in ModelConfig.parse(MISTRAL).to_hf()


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("olmo2", "no class"), ("gemma3", "images"), ("qwen3_next", "recurrent"), ("mimo", "code"), ("nosuch", "")],
)
def test_other_families_are_refused_with_the_reason_and_the_list(model_type: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.parse({**LLAMA, "model_type": model_type})
    assert model_type in error.value.detail
    assert why in error.value.detail
    assert all(known in str(error.value.hint) for known in ("qwen3_moe", "gemma3_text", "mistral"))


def test_smollm2_as_it_is_published() -> None:
    published = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 49152,
    }
    model = ModelConfig.parse(published)
    assert (model.head_dim, model.rope_theta, model.rope_scaling) == (64, 100000.0, None)


def test_llamas_scaling_is_read_from_every_spelling() -> None:
    plain = {key: value for key, value in LLAMA.items() if key != "rope_parameters"}
    old = {key: value for key, value in SCALED.items() if key != "rope_theta"}
    models_ = [
        ModelConfig.parse(config)
        for config in (
            LLAMA,
            plain | {"rope_theta": 500.0, "rope_scaling": old},
            plain | {"rope_theta": 500.0, "rope_scaling": old | {"type": "llama3"}},
        )
    ]
    assert models_[0].rope_scaling is not None
    assert models_[0] == models_[1] == models_[2]
    assert models_[0].difference(ModelConfig.parse(plain | {"rope_theta": 500.0})) == "rope_scaling"


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias=True"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias=True"),
        (LLAMA, {"architectures": ["MistralForCausalLM"]}, "is not that of model_type='llama'"),
        (LLAMA, {"model_type": "olmo2"}, "model_type='olmo2'"),
        (LLAMA, {"model_type": ["llama"]}, "model_type=['llama']"),
        (LLAMA, {"hidden_size": 33, "head_dim": None}, "hidden_size=33 is no multiple of num_attention_heads=4"),
        (LLAMA, {"rope_parameters": SCALED | {"factor": 0}}, "rope_parameters.factor is 0"),
        (LLAMA, {"rope_parameters": SCALED | {"high_freq_factor": 1.0}}, "high_freq_factor=1 is not above"),
        (LLAMA, {"rope_parameters": SCALED | {"mscale": 1.0}}, "rope_parameters.mscale=1.0"),
        (LLAMA, {"rope_parameters": SCALED | {"original_max_position_embeddings": 1.5}}, "original_max_position"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3"}}, "lacks factor, low_freq_factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "default"}}, "rope_scaling and rope_parameters differ"),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        (QWEN2, {"rope_parameters": SCALED}, "rope_parameters.rope_type='llama3'"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN2, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types=['sliding_attention'"),
        (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (GEMMA, {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (GEMMA, {"layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types="),
        (GEMMA, {"layer_types": ["sliding_attention"]}, "layer_types has 1 entries, num_hidden_layers is 2"),
        (GEMMA, {"sliding_window": None}, "sliding_window is None"),
        (GEMMA, {"query_pre_attn_scalar": 24.5}, "query_pre_attn_scalar is 24.5"),
        (GEMMA, {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
        (DEEPSEEK, {"v_head_dim": 33}, "v_head_dim=33"),
        (DEEPSEEK, {"num_key_value_heads": 1}, "num_key_value_heads=1"),
        (DEEPSEEK, {"n_group": 3}, "n_group=3"),
        (DEEPSEEK, {"topk_group": 1}, "topk_group=1"),
        (DEEPSEEK, {"kv_lora_rank": None}, "kv_lora_rank is None"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave=False"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method='greedy'"),
        (DEEPSEEK, {"rope_scaling": {"type": "yarn", "factor": 40}, "rope_parameters": None}, "yarn"),
        (DEEPSEEK, {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        (QWEN2_MOE, {"qkv_bias": False}, "qkv_bias=False"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.parse(config | change)
    assert named in str(error.value)
