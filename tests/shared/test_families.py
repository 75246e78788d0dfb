"""Records of families: complete, and enough for a new family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.errors import ConfigError
from shared.models import names
from shared.models.config import ModelConfig
from shared.models.families import families, supported
from shared.models.family import FULL, SLIDING, Family
from tests.support import decoder_reference, imaginary_family, models
from tests.support import families as cases
from volley_commands.refused_models import reason


def test_every_family_has_log_probabilities_of_transformers() -> None:
    assert {cases.case(name).config["model_type"] for name in cases.NAMES} == families().keys()


@pytest.mark.parametrize("name", ["deepseek-v3", "moonlight", "qwen2-moe", "qwen3-moe", "qwen3-moe-plain"])
def test_the_reference_sends_tokens_to_the_experts_of_transformers(name: str) -> None:
    """And their shape is what routing replay expects of the model."""
    case, routed = cases.case(name), list[np.ndarray]()
    decoder_reference.logits(case.weights, case.config, case.ids.tolist(), routed=routed)
    np.testing.assert_array_equal(np.sort(np.stack(routed, axis=1), axis=-1), case.experts)
    routing = ModelConfig.parse(case.written).routing
    assert routing is not None
    assert case.experts is not None
    routing.check(case.experts)


@pytest.mark.parametrize("model_type", families())
def test_records_are_complete(model_type: str) -> None:
    family = families()[model_type]
    assert family.architecture.endswith("ForCausalLM")
    assert family.title in supported()
    assert family.defaults.keys() == {"num_key_value_heads", "head_dim", "max_position_embeddings"}
    assert set(family.layer_types) <= {FULL, SLIDING}
    assert SLIDING not in family.layer_types or "sliding_window" in (family.attention or {})
    assert all(names.is_leaf(f"layers.0.{leaf}") for leaf in family.names)


def test_no_family_is_refused() -> None:
    assert not [name for name in families() if reason(name)]


def test_names_that_one_family_adds_are_new() -> None:
    added = [leaf for family in families().values() for leaf in family.names]
    assert len(set(added)) == len(added)
    assert not set(added) & names.BLOCK.keys()


def test_parts_that_are_not_computed_together_are_refused() -> None:
    plain = {"title": "X", "architecture": "X", "defaults": {}, "neutral": {}, "written": {}}
    with pytest.raises(ValueError, match="experts"):
        Family(**plain, experts={}, activation="gelu_pytorch_tanh")


def test_a_new_family_is_one_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ModelConfig.parse(imaginary_family.CONFIG)
    with imaginary_family.added(tmp_path):
        model = ModelConfig.parse(imaginary_family.CONFIG)
        assert model.attention is not None
        assert [model.attention.window(layer) for layer in range(2)] == [None, 7]
        assert model.logit_softcap == 5.0
        assert model.to_hf()["imaginary"] is True
        assert "query_pre_attn_scalar" not in model.to_hf()
        assert ModelConfig.parse(model.to_hf()) == model
        assert "Imaginary (imaginary)" in supported()
        weights = models.random_weights(model.to_hf(), 0)
        assert all(names.is_leaf(leaf) for leaf in models.to_tunix(weights, model.to_hf()))
    with pytest.raises(ConfigError):
        ModelConfig.parse(imaginary_family.CONFIG)
