"""One description of a model, from every spelling of its config.json; a key is computed, without effect, or refused by
its name.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.models.config import ModelConfig
from tests.support import models

OLD = models.tiny_config()
NEW = {key: value for key, value in OLD.items() if key not in ("rope_theta", "torch_dtype")} | {
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "dtype": "float32",
    "layer_types": ["full_attention"] * 2,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "transformers_version": "5.12.1",
}


def test_both_spellings_are_the_same_model() -> None:
    assert ModelConfig.parse(NEW) == ModelConfig.parse(OLD)
    both = OLD | {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}}
    assert ModelConfig.parse(both) == ModelConfig.parse(OLD)


def test_what_is_written_is_read_as_the_same() -> None:
    for config in (OLD, NEW, OLD | {"eos_token_id": None}, OLD | {"eos_token_id": [7, 2]}):
        model = ModelConfig.parse(config)
        assert ModelConfig.parse(json.loads(json.dumps(model.to_hf()))) == model


def test_defaults_are_those_of_hugging_face() -> None:
    """Printed by `Qwen3Config()` of transformers 5.12 and 4.57."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
    }
    found = ModelConfig.parse({"model_type": "qwen3", **sizes})
    assert (found.head_dim, found.num_key_value_heads, found.rope_theta) == (128, 32, 10000.0)
    assert (found.rms_norm_eps, found.tie_word_embeddings, found.initializer_range) == (1e-6, False, 0.02)
    assert found.max_position_embeddings == 32768
    assert ModelConfig.parse({"model_type": "qwen3", **sizes, "num_key_value_heads": None}).num_key_value_heads == 32


# Another value of every key that transformers writes, and of keys that the engine or other families read. None: without
# effect.
CHANGED: dict[str, tuple[Any, str | None]] = {
    "architectures": (["Qwen3ForSequenceClassification"], "refused"),
    "model_type": ("mistral", "refused"),
    "vocab_size": (513, "vocab_size"),
    "hidden_size": (65, "hidden_size"),
    "intermediate_size": (129, "intermediate_size"),
    "num_hidden_layers": (3, "num_hidden_layers"),
    "num_attention_heads": (8, "num_attention_heads"),
    "num_key_value_heads": (4, "num_key_value_heads"),
    "head_dim": (64, "head_dim"),
    "hidden_act": ("gelu", "refused"),
    "rms_norm_eps": (1e-5, "rms_norm_eps"),
    "rope_theta": (5e5, "rope_theta"),
    "rope_parameters": ({"rope_theta": 5e5, "rope_type": "default"}, "rope_theta"),
    "tie_word_embeddings": (True, "tie_word_embeddings"),
    "attention_bias": (True, "refused"),
    "attention_dropout": (0.1, "refused"),
    "use_sliding_window": (True, "refused"),
    "layer_types": (["full_attention", "sliding_attention"], "refused"),
    "partial_rotary_factor": (0.5, "refused"),
    "rope_scaling": ({"rope_type": "yarn", "factor": 4.0}, "refused"),
    "quantization_config": ({"quant_method": "fp8"}, "refused"),
    "compression_config": ({"format": "float-quantized"}, "refused"),
    "mlp_bias": (True, "refused"),
    "final_logit_softcapping": (30.0, "refused"),
    "attn_logit_softcapping": (50.0, "refused"),
    "is_encoder_decoder": (True, "refused"),
    "add_cross_attention": (True, "refused"),
    "pruned_heads": ({"0": [1]}, "refused"),
    "auto_map": ({"AutoModelForCausalLM": "x.Y"}, "refused"),
    "output_router_logits": (True, "refused"),
    # Not computed with: limits, text, training from nothing, and what this project decides by its own configuration.
    "max_position_embeddings": (4096, None),
    "initializer_range": (0.05, None),
    "eos_token_id": ([2, 3], None),
    "bos_token_id": (1, None),
    "pad_token_id": (1, None),
    "sliding_window": (4096, None),
    "max_window_layers": (1, None),
    "torch_dtype": ("bfloat16", None),
    "dtype": ("bfloat16", None),
    "use_cache": (False, None),
    "transformers_version": ("4.51.0", None),
    "v_head_dim": (64, None),
    "num_experts": (8, None),
    "seq_length": (17, None),
}


@pytest.mark.parametrize("config", [OLD, NEW], ids=["transformers-4", "transformers-5"])
def test_every_key_is_computed_without_effect_or_refused(config: dict[str, Any]) -> None:
    assert config.keys() <= CHANGED.keys()
    before = ModelConfig.parse(config)
    for key, (value, effect) in CHANGED.items():
        other = {k: v for k, v in config.items() if not (key == "rope_parameters" and k == "rope_theta")}
        other |= {"layer_types": None} if key == "num_hidden_layers" else {}
        other |= {"rope_parameters": None} if key == "rope_theta" else {}
        other[key] = value
        if effect == "refused":
            with pytest.raises(ConfigError, match=key):
                ModelConfig.parse(other)
        else:
            assert before.difference(ModelConfig.parse(other)) == effect, key


@pytest.mark.parametrize("value", ["64", math.nan, math.inf, -2, 0, True, None, 1 << 62, 1e30, 2.5, [], {}])
@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "max_position_embeddings"],
)
def test_a_size_is_a_whole_number(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"x/config.json: {key} is "):
        ModelConfig.parse(OLD | {key: value}, "x/config.json")


@pytest.mark.parametrize("value", ["1e4", math.nan, math.inf, -1.0, 0, True, None, 1e300, []])
@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "initializer_range"])
def test_a_number_is_positive_and_finite(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key} is "):
        ModelConfig.parse(OLD | {key: value})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"attention_bias": 0}, "attention_bias=0"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 2"),
        ({"layer_types": "full_attention"}, "layer_types="),
        ({"eos_token_id": 512}, "eos_token_id 512 is outside the vocabulary of 512"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is"),
        (
            {"rope_parameters": {"rope_theta": 5e5}},
            "several values of θ: rope_theta=10000, rope_parameters.rope_theta=500000",
        ),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type='llama3'"),
        ({"rope_parameters": {"rope_type": "default", "factor": 8.0}}, "rope_parameters.factor=8.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor=0.5"),
        ({"rope_parameters": [1]}, "rope_parameters=[1]"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.type='dynamic'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type='linear'"),
    ],
)
def test_what_does_not_fit_together_or_is_not_computed_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.parse(OLD | change)
    assert named in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"a": NaN}', "[" * 100_000, "\ud800"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.read(tmp_path)


def test_a_missing_file_and_a_folder_in_its_place_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        ModelConfig.read(tmp_path)


def test_texts_end_where_either_file_says(tmp_path: Path) -> None:
    models.write_hf(tmp_path, OLD | {"eos_token_id": 0})
    assert ModelConfig.read(tmp_path).eos_token_ids == (0,)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [5, 0], "temperature": 0.6}), encoding="utf-8")
    assert ModelConfig.read(tmp_path).eos_token_ids == (0, 5)
    generation.write_text(json.dumps({"eos_token_id": 151645}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"151645 is outside the vocabulary of 512.*generation_config\.json"):
        ModelConfig.read(tmp_path)
    generation.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not valid JSON"):
        ModelConfig.read(tmp_path)
