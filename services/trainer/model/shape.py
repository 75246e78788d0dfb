"""What a Hugging Face `config.json` of Qwen3 says, and which of its leaves our parameters are. No JAX here.

Invariant: a configuration we would compute differently from Hugging Face is refused, never approximated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import ConfigError

_SUPPORTED = "supported is dense Qwen3: silu, no biases, no sliding window, plain RoPE"
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)
_BLOCK = {
    "attn.q_proj.w": "self_attn.q_proj",
    "attn.k_proj.w": "self_attn.k_proj",
    "attn.v_proj.w": "self_attn.v_proj",
    "attn.o_proj.w": "self_attn.o_proj",
    "attn.q_norm.w": "self_attn.q_norm",
    "attn.k_norm.w": "self_attn.k_norm",
    "mlp.gate_proj.kernel": "mlp.gate_proj",
    "mlp.up_proj.kernel": "mlp.up_proj",
    "mlp.down_proj.kernel": "mlp.down_proj",
    "input_layernorm.w": "input_layernorm",
    "post_attention_layernorm.w": "post_attention_layernorm",
}
_TOP = {"embedder.input_embedding": "model.embed_tokens.weight", "final_norm.w": "model.norm.weight", "lm_head.w": "lm_head.weight"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense Qwen3, under the names of config.json where they differ little; `raw` is the file's content."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    tied: bool
    initializer_range: float
    raw: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Reads `folder`/config.json. Raises ConfigError naming the file and the key that is wrong."""
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"model file {path}: {error.strerror}", "model.path must be a Hugging Face folder or hub id") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"model file {path} is not valid JSON: {error}") from error
        return cls.parse(raw, str(path))

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str = "config.json") -> ModelShape:
        """Raises ConfigError if a key is missing or asks for something that is not computed here."""
        missing = [key for key in _REQUIRED if key not in raw]
        if missing:
            raise ConfigError(f"{where} lacks {', '.join(missing)}", _SUPPORTED)
        _refuse_unsupported(raw, where)
        rope = raw.get("rope_parameters") or {}
        theta = raw.get("rope_theta", rope.get("rope_theta"))
        if theta is None:
            raise ConfigError(f"{where} lacks rope_theta", _SUPPORTED)
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            n_layers=raw["num_hidden_layers"],
            n_heads=raw["num_attention_heads"],
            n_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            norm_eps=raw["rms_norm_eps"],
            rope_theta=float(theta),
            tied=bool(raw.get("tie_word_embeddings", False)),
            initializer_range=float(raw.get("initializer_range", 0.02)),
            raw=raw,
        )


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    wrong = [
        ("model_type", raw.get("model_type"), raw.get("model_type") == "qwen3"),
        ("hidden_act", raw.get("hidden_act"), raw.get("hidden_act", "silu") == "silu"),
        ("attention_bias", raw.get("attention_bias"), not raw.get("attention_bias")),
        ("use_sliding_window", raw.get("use_sliding_window"), not raw.get("use_sliding_window")),
        ("rope_type", rope.get("rope_type"), rope.get("rope_type", rope.get("type", "default")) == "default"),
    ]
    for key, value, fine in wrong:
        if not fine:
            raise ConfigError(f"{where}: {key}={value!r} is not supported", _SUPPORTED)


def hf_name(leaf: str) -> str:
    """The Hugging Face tensor of a parameter leaf: layers.0.attn.q_proj.w -> model.layers.0.self_attn.q_proj.weight."""
    if leaf in _TOP:
        return _TOP[leaf]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", leaf)
    if match is None or match[2] not in _BLOCK:
        raise KeyError(leaf)
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.weight"


def from_hf(leaf: str, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A Hugging Face tensor ([out, in] for linear layers) in the orientation and shape of the leaf.

    Raises ValueError if the sizes do not fit.
    """
    out = tensor if leaf == "embedder.input_embedding" or tensor.ndim == 1 else tensor.T
    if out.size != np.prod(shape) or (out.ndim == len(shape) and out.shape != shape):
        raise ValueError(f"{hf_name(leaf)} has shape {list(tensor.shape)}, which does not make {list(shape)}")
    return out.reshape(shape)
