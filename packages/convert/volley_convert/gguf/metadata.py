"""Metadata of a GGUF file: config.json, special tokens and generation settings that they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from shared.errors import ConfigError
from shared.models.families import families
from shared.models.family import FULL, SLIDING, Family
from shared.models.rope import Llama3Scaling, frequencies

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""`model_type` of each `general.architecture`."""
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_UNREAD = ("attention.scale", "attention.clamp_kqv", "logit_scale", "residual_scale", "embedding_scale")
"""Keys that change the computation, of architectures that are not converted."""
_PATTERN = "attention.sliding_window_pattern"
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3.1 to 3.3; a file holds only the factors of the frequencies."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Key-value pairs of a file; `architecture` is the prefix of the model's own keys."""

    file: Path
    architecture: str
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, reader: Any, file: Path) -> Self:
        """Read the pairs. Raises ConfigError for a file that is not one whole model of a known architecture."""
        try:
            fields = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{file}: its metadata cannot be read: {error}", "download it again") from error
        if (parts := fields.get("split.count", 1)) > 1:
            raise ConfigError(
                f"{file} is one of {parts} parts of a model", "join them with `llama-gguf-split --merge`, and name that"
            )
        if (kind := fields.get("general.type", "model")) != "model":
            raise ConfigError(f"{file} holds no model: its general.type is {kind!r}", "name the file of the model")
        if (architecture := fields.get("general.architecture")) not in MODEL_TYPES:
            raise ConfigError(
                f"{file} holds a model of the architecture {architecture!r}",
                f"converted are {', '.join(MODEL_TYPES)}",
            )
        return cls(file, architecture, fields)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key; `default` where it is absent."""
        return self.fields.get(key, default)

    def of(self, key: str) -> Any:
        """Value of a required key. Raises ConfigError."""
        if key not in self.fields:
            raise ConfigError(f"{self.file} lacks the key {key}", "is it a whole model, and not damaged?")
        return self.fields[key]

    def own(self, key: str, default: Any = None) -> Any:
        """Value of one of the architecture's keys; `default` where it is absent."""
        return self.get(f"{self.architecture}.{key}", default)


def config_of(metadata: Metadata, *, tied: bool, factors: np.ndarray | None = None) -> dict[str, Any]:
    """Make config.json; `factors` divide the rotary frequencies, float [head_dim / 2]. Raises ConfigError."""
    prefix, model_type = metadata.architecture, MODEL_TYPES[metadata.architecture]
    family = families()[model_type]
    if unread := next((key for key in _UNREAD if metadata.own(key)), None):
        raise ConfigError(f"{metadata.file}: {prefix}.{unread} is not computed", "it cannot be converted")
    sizes = {name: metadata.of(f"{prefix}.{key}") for key, name in _SIZES.items()}
    given = {name: value for key, name in _OPTIONAL.items() if (value := metadata.own(key))}
    rotary = metadata.own("rope.dimension_count")
    head_dim = metadata.own("attention.key_length") or rotary or sizes["hidden_size"] // sizes["num_attention_heads"]
    epsilon = metadata.of(f"{prefix}.attention.layer_norm_rms_epsilon")
    config = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": len(metadata.of("tokenizer.ggml.tokens")),
        **sizes,
        **given,
        "head_dim": head_dim,
        "partial_rotary_factor": 1.0 if rotary is None else rotary / head_dim,
        "rms_norm_eps": float(f"{epsilon:.6g}"),
        "rope_theta": metadata.own("rope.freq_base", 10_000.0),
        "tie_word_embeddings": tied,
        "hidden_act": family.activation,
        **family.written,
        **_of_attention(metadata, sizes, head_dim),
        **_of_experts(metadata, family),
        **token_ids(metadata),
    }
    scaling = metadata.own("rope.scaling.type", "none")
    if scaling != "none":  # refused by name
        config["rope_scaling"] = {"rope_type": scaling, "factor": metadata.own("rope.scaling.factor")}
    return config if factors is None else config | {"rope_scaling": _llama3(metadata, config, factors)}


def _of_attention(metadata: Metadata, sizes: Mapping[str, int], head_dim: int) -> dict[str, Any]:
    """Keys that a file leaves to the architecture, as llama.cpp sets them."""
    if metadata.architecture not in ("gemma2", "gemma3"):
        return {"use_sliding_window": True} if metadata.own("attention.sliding_window") else {}
    largest = {"gemma2": 46, "gemma3": 62}[metadata.architecture] == sizes["num_hidden_layers"]  # 27B
    scalar = sizes["hidden_size"] // sizes["num_attention_heads"] if largest else head_dim
    pattern = metadata.own(_PATTERN)
    if isinstance(pattern, list):
        return {"query_pre_attn_scalar": scalar, "layer_types": [SLIDING if one else FULL for one in pattern]}
    return {"query_pre_attn_scalar": scalar} | ({"sliding_window_pattern": pattern} if pattern else {})


def _of_experts(metadata: Metadata, family: Family) -> dict[str, Any]:
    """Sizes of the experts. llama.cpp makes the weights of the chosen ones add up to 1 for Qwen3-MoE alone."""
    if family.experts is None:
        if metadata.own("expert_count"):
            raise ConfigError(
                f"{metadata.file} holds a {metadata.architecture} model with experts, such as Mixtral",
                "with experts, qwen2moe and qwen3moe are converted",
            )
        return {}
    prefix = metadata.architecture
    sizes = {name: metadata.of(f"{prefix}.{key}") for key, name in _EXPERTS.items() if name in family.experts}
    return sizes | {"norm_topk_prob": prefix == "qwen3moe"}


def _llama3(metadata: Metadata, config: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Find Llama 3's scaling that has these factors. Raises ConfigError if it is another scaling."""
    scaling = Llama3Scaling(factor=float(factors.max(initial=1.0)), **_LLAMA3)
    theta, size = config["rope_theta"], config["head_dim"]
    made = frequencies(theta, size, None) / frequencies(theta, size, scaling)
    if made.shape != factors.shape or not np.allclose(made, factors, rtol=1e-4):
        raise ConfigError(
            f"{metadata.file}: rope_freqs.weight is not the scaling of Llama 3.1 to 3.3", "it cannot be converted"
        )
    return scaling.to_hf()


def token_ids(metadata: Metadata) -> dict[str, int]:
    """Special tokens by their names in config.json.

    Padding is not the end token where the file has another, because ends of turns are learned.
    """
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    padding, unknown = ids.pop("padding"), ids.pop("unknown")
    ids["pad"] = unknown if padding in (None, ids["eos"]) else padding
    n = len(metadata.of("tokenizer.ggml.tokens"))
    found = {f"{name}_token_id": token for name, token in ids.items() if token is not None}
    if wrong := next((name for name, token in found.items() if token >= n), None):
        raise ConfigError(f"{metadata.file}: its {wrong} is outside its vocabulary", "it is damaged")
    return found


def generation_of(metadata: Metadata) -> dict[str, Any]:
    """Make generation_config.json: all tokens that end a turn, and the sampling that the model's authors advise."""
    ids = token_ids(metadata)
    ends = [ids.get("eos_token_id"), *(metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))]
    ends = [token for token in dict.fromkeys(ends) if token is not None]
    advised = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    sampling = {name: _rounded(value) for name, value in advised.items() if value is not None}
    return ids | ({"eos_token_id": ends} if ends else {}) | sampling | ({"do_sample": True} if sampling else {})


def _rounded(value: float) -> float:
    """Decimal number that a float32 stands for."""
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value
