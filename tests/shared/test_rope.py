"""Rotary positions: every way to write them means what transformers makes of it, or is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shared.errors import ConfigError
from shared.models.config import ModelConfig
from tests.support import rope_configs

EXPECTED = json.loads((rope_configs.FIXTURES / "expected.json").read_text(encoding="utf-8"))
REFUSED = {
    # transformers lets one of two values win
    "θ, parameters",
    "parameters, scaling default",
    "parameters, scaling of type default",
    "parameters of llama3, scaling default",
    "parameters, scaling of llama3",
    "parameters of llama3, the same scaling",
    "θ, scaling of llama3, and type default",
    "θ, scaling of llama3 with θ",
    "θ, scaling of llama3, another length at the top",
    # transformers ignores these
    "θ, partial 0.5",
    "parameters, partial 0.5 within",
    "parameters, partial 0.5",
    "θ, scaling of llama3 without type",
    "θ, scaling with a factor",
    # transformers computes these
    "θ, linear scaling",
    "θ, scaling of llama3, length at the top",
}


@pytest.mark.parametrize("model_type", rope_configs.FAMILIES)
@pytest.mark.parametrize("name", rope_configs.CONFIGS)
def test_frequencies_are_those_of_transformers(name: str, model_type: str):
    expected = EXPECTED[model_type][name]
    assert not isinstance(expected, str)
    if name in REFUSED or ("llama3" in name and model_type != "llama"):
        with pytest.raises(ConfigError, match=r"rope|partial_rotary_factor|original_max|values of θ"):
            ModelConfig.parse(rope_configs.described(model_type, name))
        return
    found = ModelConfig.parse(rope_configs.described(model_type, name))
    assert np.allclose(found.rope_frequencies(), expected, rtol=1e-5)
    assert np.allclose(ModelConfig.parse(found.to_hf()).rope_frequencies(), expected, rtol=1e-5)
