"""Ways to write rotary positions in a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.models.families import families

FIXTURES = Path(__file__).parents[1] / "fixtures" / "rope"
SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_SCALED = {"rope_type": "llama3", **_LLAMA3}
_LENGTHLESS = {key: value for key, value in _SCALED.items() if not key.startswith("original")}
_PLAIN = {"rope_type": "default", "rope_theta": 7e5}
_TOP: dict[str, Any] = {"rope_theta": 5e5}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "nothing": {},
    "θ": _TOP,
    "θ, scaling null": _TOP | {"rope_scaling": None},
    "θ, scaling default": _TOP | {"rope_scaling": {"rope_type": "default"}},
    "θ, scaling of type default": _TOP | {"rope_scaling": {"type": "default"}},
    "θ, scaling empty": _TOP | {"rope_scaling": {}},
    "θ, parameters empty": _TOP | {"rope_parameters": {}},
    "θ, parameters null": _TOP | {"rope_parameters": None},
    "θ, parameters without θ": _TOP | {"rope_parameters": {"rope_type": "default"}},
    "θ, parameters": _TOP | {"rope_parameters": _PLAIN},
    "θ, the same parameters": {"rope_theta": 7e5, "rope_parameters": _PLAIN},
    "θ, partial 1": _TOP | {"partial_rotary_factor": 1.0},
    "θ, partial 0.5": _TOP | {"partial_rotary_factor": 0.5},
    "θ, partial null": _TOP | {"partial_rotary_factor": None},
    "parameters": {"rope_parameters": _PLAIN},
    "parameters without θ": {"rope_parameters": {"rope_type": "default"}},
    "parameters without type": {"rope_parameters": {"rope_theta": 7e5}},
    "parameters, partial 0.5 within": {"rope_parameters": _PLAIN | {"partial_rotary_factor": 0.5}},
    "parameters, partial 1 within": {"rope_parameters": _PLAIN | {"partial_rotary_factor": 1.0}},
    "parameters, partial 0.5": {"partial_rotary_factor": 0.5, "rope_parameters": _PLAIN},
    "parameters, scaling null": {"rope_parameters": _PLAIN, "rope_scaling": None},
    "parameters, scaling empty": {"rope_parameters": _PLAIN, "rope_scaling": {}},
    "parameters, scaling default": {"rope_parameters": _PLAIN, "rope_scaling": {"rope_type": "default"}},
    "parameters, scaling of type default": {"rope_parameters": _PLAIN, "rope_scaling": {"type": "default"}},
    "parameters, scaling default with θ": {
        "rope_parameters": _PLAIN,
        "rope_scaling": {"rope_type": "default", "rope_theta": 7e5},
    },
    "parameters, θ, scaling default": {
        "rope_theta": 7e5,
        "rope_parameters": _PLAIN,
        "rope_scaling": {"rope_type": "default"},
    },
    "parameters with the default θ, scaling default": {
        "rope_parameters": {"rope_theta": 1e4},
        "rope_scaling": {"rope_type": "default"},
    },
    "parameters of llama3, scaling default": {
        "rope_parameters": _SCALED | {"rope_theta": 7e5},
        "rope_scaling": {"rope_type": "default"},
    },
    "parameters, scaling of llama3": {"rope_parameters": _PLAIN, "rope_scaling": _SCALED},
    "parameters of llama3, the same scaling": {
        "rope_parameters": _SCALED | {"rope_theta": 7e5},
        "rope_scaling": _SCALED,
    },
    "parameters of llama3": {"rope_parameters": _SCALED | {"rope_theta": 7e5}},
    "parameters of llama3 without θ": {"rope_parameters": _SCALED},
    "θ, parameters of llama3": _TOP | {"rope_parameters": _SCALED},
    "θ, scaling of llama3": _TOP | {"rope_scaling": _SCALED},
    "θ, scaling by type of llama3": _TOP | {"rope_scaling": {"type": "llama3", **_LLAMA3}},
    "θ, scaling of llama3, twice": _TOP | {"rope_scaling": _SCALED | {"type": "llama3"}},
    "θ, scaling of llama3, and type default": _TOP | {"rope_scaling": _SCALED | {"type": "default"}},
    "θ, scaling of llama3 without type": _TOP | {"rope_scaling": _LLAMA3},
    "θ, scaling of llama3 with θ": _TOP | {"rope_scaling": _SCALED | {"rope_theta": 7e5}},
    "scaling of llama3 with θ": {"rope_scaling": _SCALED | {"rope_theta": 7e5}},
    "scaling with θ": {"rope_scaling": {"rope_theta": 7e5}},
    "θ, scaling with a factor": _TOP | {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
    "θ, linear scaling": _TOP | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "θ, scaling of llama3, length at the top": _TOP
    | {"original_max_position_embeddings": 16, "rope_scaling": _LENGTHLESS},
    "θ, scaling of llama3, the same length at the top": _TOP
    | {"original_max_position_embeddings": 16, "rope_scaling": _SCALED},
    "θ, scaling of llama3, another length at the top": _TOP
    | {"original_max_position_embeddings": 32, "rope_scaling": _SCALED},
    "θ, a length at the top": _TOP | {"original_max_position_embeddings": 32},
    "θ under another name": {"rope_base": 5e5, "rotary_emb_base": 5e5},
}


def described(model_type: str, name: str) -> dict[str, Any]:
    """The config.json of a small model."""
    activation = families()[model_type].activation
    return {"model_type": model_type, **SIZES, "hidden_act": activation, **CONFIGS[name]}
