"""Configuration of a model, read once from a Hugging Face folder for both trainer and engine.

Invariants: an accepted config.json means exactly what transformers' configuration class of that `model_type` means by
it, defaults included, whichever version wrote it (θ at the top or in `rope_parameters`). A key that asks for something
that trainer or engine do not compute is refused by name. Neither side reads config.json itself: the engine starts from
the output of `to_hf`, so a key that is not named here has no effect on either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import orjson

from shared import packages
from shared.errors import ConfigError
from shared.models import rope
from shared.models.families import families, supported
from shared.models.family import FULL, Family
from shared.models.family_parts import AttentionConfig, Experts, Latent
from shared.models.rope import Llama3Scaling
from shared.models.values import boolean, number, shorten, size, unsupported
from shared.routing import RoutingShape

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_REQUIRED = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
}
_DEFAULT_EPS, _DEFAULT_INITIALIZER_RANGE = 1e-6, 0.02
# Keys that change the computation, here or in another family, with the values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (None, False),
    "attention_dropout": (0, 0.0),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "compression_config": (None,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
    "auto_map": (None,),
    "output_router_logits": (None, False),
    "transformers_weights": (None,),
}
_SPELLED = ("model_type", "rope_scaling", "eos_token_ids", "experts", "attention", "latent")
_NOT_COMPUTED = ("max_position_embeddings", "initializer_range", "eos_token_ids")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Decoder of one of the families, under the names of its config.json.

    Attributes:
        initializer_range: standard deviation of random weights.
        eos_token_ids: tokens that end a text unless a request names others; sorted, with those of
            generation_config.json.
        experts: None if the layers are dense.
        attention: None if attention and logits are plain.
        latent: None if queries, keys and values are projected at once. Otherwise `head_dim` is the part of a head that
            rotary positions turn.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    experts: Experts | None = None
    attention: AttentionConfig | None = None
    latent: Latent | None = None

    @property
    def routing(self) -> RoutingShape | None:
        """Shape of the routing to experts, of the layers that have some; None for a dense model."""
        if (experts := self.experts) is None:
            return None
        n_layers = self.num_hidden_layers - experts.first_k_dense_replace
        return RoutingShape(n_layers, experts.num_experts, experts.num_experts_per_tok) if n_layers > 0 else None

    @property
    def n_numbers(self) -> int:
        """Upper bound of the number of parameters: all matrices, norms and biases."""
        d, size, experts = self.hidden_size, self.head_dim, self.experts
        of_heads = (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * size
        mlp = 3 * (d + 1) * self.intermediate_size
        if experts is not None:
            mlp = experts.num_experts * (d + 3 * (d + 1) * experts.moe_intermediate_size)
            mlp += d + experts.num_experts + 3 * (d + 1) * experts.shared_size
        attention = (d + 1) * of_heads
        if self.latent is not None:
            attention = self.latent.n_numbers(d, self.num_attention_heads)
        block = attention + mlp + 4 * d + 2 * size
        dense = 0 if experts is None else experts.first_k_dense_replace
        shorter = dense * (mlp - 3 * (d + 1) * self.intermediate_size)
        embeddings = 1 if self.tie_word_embeddings else 2
        return embeddings * self.vocab_size * d + self.num_hidden_layers * block - shorter + d

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read config.json and, if present, generation_config.json. Raises ConfigError with the file and the key."""
        path, generation = folder / CONFIG, folder / GENERATION_CONFIG
        eos = _eos_of(_load(generation), str(generation)) if generation.exists() else ()
        return cls.parse(_load(path), str(path), eos)

    @classmethod
    def parse(cls, raw: object, where: str = CONFIG, more_eos: Iterable[int] = ()) -> Self:
        """Parse a config.json's content; `where` names it in errors. Raises ConfigError with `where` and the key."""
        if not isinstance(raw, dict):
            raise ConfigError(f"{where} is not a JSON object", "model.path must be the folder of a Hugging Face model")
        given = cast(dict[str, Any], raw)
        model_type = _model_type(given, where)
        family = families()[model_type]
        _refuse_unsupported(given, family, where)
        given = rope.flattened(given, where) if "rope_local_base_freq" in (family.attention or {}) else given
        theta, scaling = rope.parse(given, where, llama3=family.llama3_rope, default=family.rope_theta)
        latent = Latent.parse(given, family, where)
        if latent is not None:  # as transformers does, whatever config.json says
            given = {**given, "head_dim": latent.qk_rope_head_dim}
        sizes = _sizes(given, family, where)
        found = cls(
            model_type=model_type,
            **sizes,
            rms_norm_eps=number(given.get("rms_norm_eps", _DEFAULT_EPS), "rms_norm_eps", where, 1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=boolean(given.get("tie_word_embeddings", family.tied), "tie_word_embeddings", where),
            initializer_range=number(
                given.get("initializer_range", _DEFAULT_INITIALIZER_RANGE), "initializer_range", where, 100.0
            ),
            eos_token_ids=tuple(sorted({*_eos_of(given, where), *more_eos})),
            experts=Experts.parse(given, family, where),
            attention=AttentionConfig.parse(given, family, sizes["num_hidden_layers"], where),
            latent=latent,
        )
        _check_together(found, given, where)
        return found

    def to_hf(self) -> dict[str, Any]:
        """Write a config.json that every transformers reads alike: θ at the top, nothing left to a default."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _SPELLED}
        eos, family = list(self.eos_token_ids), self.family
        constant = {
            "architectures": [family.architecture],
            "model_type": self.model_type,
            "hidden_act": family.activation,
        }
        scaling = {} if self.rope_scaling is None else {"rope_scaling": self.rope_scaling.to_hf()}
        experts = {} if self.experts is None else self.experts.to_hf(family)
        attention = {} if self.attention is None else self.attention.to_hf(family, self.num_hidden_layers)
        latent = {} if self.latent is None else asdict(self.latent)
        written = {
            **family.written,
            **experts,
            **attention,
            **latent,
            "attention_dropout": 0.0,
            "eos_token_id": eos or None,
        }
        return constant | named | scaling | written

    @property
    def logit_softcap(self) -> float | None:
        """Cap c of the logits c · tanh(x / c); None: no cap."""
        return None if self.attention is None else self.attention.final_logit_softcapping

    @property
    def family(self) -> Family:
        """Record of this `model_type`."""
        return families()[self.model_type]

    def rope_frequencies(self, layer: int = 0) -> np.ndarray:
        """Rotary frequencies of a layer, float64 [head_dim / 2], in radians per position."""
        own = None if self.attention is None else self.attention.theta(layer)
        return rope.frequencies(own or self.rope_theta, self.head_dim, self.rope_scaling)

    def difference(self, other: ModelConfig) -> str | None:
        """First key that changes the computation from the same weights; None if there is none."""
        names = (field.name for field in fields(self) if field.name not in _NOT_COMPUTED)
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)


def _load(path: Path) -> object:
    try:
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"model file {path}: {error.strerror}", "model.path must be a Hugging Face folder or hub id"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"model file {path} is not valid JSON: {error}", "download it again, or correct it"
        ) from error


def _model_type(raw: Mapping[str, Any], where: str) -> str:
    """Check that the family is supported and fits `architectures`. Raises ConfigError."""
    named = raw.get("model_type", "qwen3")
    if not isinstance(named, str) or named not in families():
        reason: Callable[[object], str | None] | None = packages.part("model_refusals", required=False)
        why = None if reason is None else reason(named)
        why = why or (packages.missing(named) if isinstance(named, str) else None)
        raise unsupported("model_type", named, where, why=why)
    architectures = raw.get("architectures")
    if architectures not in (None, [families()[named].architecture]):
        raise ConfigError(
            f"{where}: architectures={shorten(architectures)} is not that of model_type={named!r}", supported()
        )
    return named


def _sizes(given: Mapping[str, Any], family: Family, where: str) -> dict[str, int]:
    """Required sizes, and those with defaults. Raises ConfigError."""
    if missing := [key for key in _REQUIRED if key not in given]:
        raise ConfigError(f"{where} lacks {', '.join(missing)}", supported())
    sizes = {key: size(given[key], key, where, most) for key, most in _REQUIRED.items()}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    for key, default in family.defaults.items():
        value = given.get(key, default)
        if value is None and key == "num_key_value_heads":
            value = heads
        elif value is None and key == "head_dim" and default is None:
            if hidden % heads:
                raise ConfigError(
                    f"{where}: hidden_size={hidden} is no multiple of num_attention_heads={heads}",
                    "correct them, or name head_dim",
                )
            value = hidden // heads
        sizes[key] = size(value, key, where, 1 << 30)
    return sizes


def _refuse_unsupported(raw: Mapping[str, Any], family: Family, where: str) -> None:
    computed = family.attention or {}
    for key, neutral in {**_NEUTRAL, **family.neutral}.items():
        value = raw.get(key, next(iter(neutral), None))
        if neutral and key not in computed and not any(type(value) is type(one) and value == one for one in neutral):
            raise unsupported(key, value, where)
    layers, kinds = raw.get("layer_types"), (FULL, *family.layer_types) if family.is_mixed else family.layer_types
    if layers is not None and not (isinstance(layers, list) and all(one in kinds for one in cast(list[Any], layers))):
        raise unsupported("layer_types", layers, where)


def _check_together(model: ModelConfig, raw: Mapping[str, Any], where: str) -> None:
    """Check values against each other. Raises ConfigError."""
    heads, kv_heads, layers = model.num_attention_heads, model.num_key_value_heads, raw.get("layer_types")
    if heads % kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}", supported()
        )
    if model.latent is not None and heads != kv_heads:
        raise unsupported("num_key_value_heads", kv_heads, where)
    if model.latent is not None and model.latent.v_head_dim > model.latent.qk_head_dim:
        raise unsupported("v_head_dim", model.latent.v_head_dim, where, why="a value is longer than its key")
    if model.head_dim % 2:
        raise ConfigError(
            f"{where}: head_dim={model.head_dim} is odd", "rotary positions turn pairs: head_dim must be even"
        )
    if layers is not None and len(layers) != model.num_hidden_layers:
        raise ConfigError(
            f"{where}: layer_types has {len(layers)} entries, num_hidden_layers is {model.num_hidden_layers}",
            supported(),
        )
    for token in model.eos_token_ids:
        if token >= model.vocab_size:
            raise ConfigError(
                f"{where}: eos_token_id {token} is outside the vocabulary of {model.vocab_size}",
                f"correct eos_token_id there or in {GENERATION_CONFIG}: no text could end with it",
            )


def _eos_of(raw: object, where: str) -> tuple[int, ...]:
    """Read `eos_token_id` of a config.json or generation_config.json: one id, a list, or none."""
    value: object = cast(dict[str, Any], raw).get("eos_token_id") if isinstance(raw, dict) else raw
    ids: list[Any] = [] if value is None else cast(list[Any], value) if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise ConfigError(
            f"{where}: eos_token_id is {shorten(value)}, expected a token id or a list of them",
            "see the tokenizer's files",
        )
    return tuple(ids)
