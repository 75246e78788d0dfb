"""Parts that only some families have, read from a config.json: experts, and variants of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from shared.errors import ConfigError
from shared.models.family import FULL, SLIDING, Family
from shared.models.rope import MAX_THETA
from shared.models.values import boolean, number, shorten, size

_MOST_EXPERTS, _MOST_SIZE, _MOST_CAP = 1 << 16, 1 << 30, 1e6
_SHARED = "shared_expert_intermediate_size"
_EVERY = ("sliding_window_pattern", "_sliding_window_pattern")
"""Spellings of transformers 4: every so manieth layer is of type `full_attention`."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts in every layer, under the names of a config.json. With `norm_topk_prob` the weights of the
    chosen experts add up to 1. `shared_expert_intermediate_size` is the size of an expert beside them that computes
    every token, weighted by a gate of its own; None: there is none.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    shared_expert_intermediate_size: int | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any], family: Family, where: str) -> Self | None:
        """Read the experts; None for a dense family. transformers 5 writes `num_local_experts`. Raises ConfigError."""
        if family.experts is None:
            return None
        spelled = {key: given[key] for key in ("num_experts", "num_local_experts") if key in given}
        if len({shorten(value) for value in spelled.values()}) > 1:
            raise ConfigError(f"{where}: num_experts and num_local_experts differ", "keep the one of the weights")
        known = {**family.experts, **given} | ({"num_experts": next(iter(spelled.values()))} if spelled else {})
        n, per_token = (size(known[key], key, where, _MOST_EXPERTS) for key in ("num_experts", "num_experts_per_tok"))
        inner = size(known["moe_intermediate_size"], "moe_intermediate_size", where, 1 << 20)
        if per_token > n:
            raise ConfigError(f"{where}: num_experts_per_tok={per_token} is more than num_experts={n}", "correct them")
        shared = known.get(_SHARED) if _SHARED in family.experts else None
        return cls(
            num_experts=n,
            num_experts_per_tok=per_token,
            moe_intermediate_size=inner,
            norm_topk_prob=boolean(given.get("norm_topk_prob", False), "norm_topk_prob", where),
            shared_expert_intermediate_size=None if shared is None else size(shared, _SHARED, where, 1 << 20),
        )

    def to_hf(self) -> dict[str, Any]:
        """Keys of config.json; without those that this model has not."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Variants of attention and logits, under the names of a config.json; None: plain, as all other families.

    Attributes:
        query_pre_attn_scalar: attention scores are divided by its square root, instead of √head_dim.
        sliding_window: number of tokens that a token sees in layers of type `sliding_attention`, itself included. None
            is no limit, in families where all layers are of this type.
        rope_local_base_freq: θ of layers of type `sliding_attention`; None: `rope_theta`.
        layer_types: type of each layer; repeats if the model has more layers.
        attn_logit_softcapping: cap c of attention scores c · tanh(x / c).
        final_logit_softcapping: cap of the logits.
    """

    query_pre_attn_scalar: int | None
    sliding_window: int | None
    layer_types: tuple[str, ...]
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    rope_local_base_freq: float | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any], family: Family, n_layers: int, where: str) -> Self | None:
        """Read the variants that the family computes; None if it has none. Raises ConfigError."""
        if family.attention is None:
            return None
        computed = family.attention

        def whole(key: str) -> int | None:
            value = given.get(key, computed.get(key))
            unlimited = value is None and key == "sliding_window" and not family.is_mixed
            return None if key not in computed or unlimited else size(value, key, where, _MOST_SIZE)

        def real(key: str, most: float = _MOST_CAP) -> float | None:
            value = given.get(key, computed.get(key))
            return None if key not in computed or value is None else number(value, key, where, most)

        return cls(
            query_pre_attn_scalar=whole("query_pre_attn_scalar"),
            sliding_window=whole("sliding_window"),
            layer_types=_layer_types(given, family, n_layers, where),
            attn_logit_softcapping=real("attn_logit_softcapping"),
            final_logit_softcapping=real("final_logit_softcapping"),
            rope_local_base_freq=real("rope_local_base_freq", MAX_THETA),
        )

    @property
    def scale(self) -> float | None:
        """Factor of attention scores; None is 1 / √head_dim."""
        return None if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar**-0.5

    def window(self, layer: int) -> int | None:
        """Number of tokens that a token sees in this layer; None: all before it."""
        return self.sliding_window if self._kind(layer) == SLIDING else None

    def to_hf(self, family: Family, n_layers: int) -> dict[str, Any]:
        """Keys of the family's config.json for a model with `n_layers` layers."""
        written = asdict(self) | {"layer_types": [self._kind(layer) for layer in range(n_layers)]}
        kinds = ("layer_types",) if family.is_mixed else ()
        return {key: value for key, value in written.items() if key in (*kinds, *(family.attention or ()))}

    def theta(self, layer: int) -> float | None:
        """θ of this layer; None: `rope_theta`."""
        return self.rope_local_base_freq if self._kind(layer) == SLIDING else None

    def _kind(self, layer: int) -> str:
        return self.layer_types[layer % len(self.layer_types)]


def _layer_types(given: Mapping[str, Any], family: Family, n_layers: int, where: str) -> tuple[str, ...]:
    """Read the type of each layer: `layer_types`, or a pattern. Raises ConfigError."""
    if family.is_mixed and given.get("layer_types"):
        return tuple(given["layer_types"])
    pattern = family.layer_types
    every = next((given[key] for key in _EVERY if family.is_mixed and given.get(key) is not None), None)
    if every is not None:
        pattern = (*(SLIDING,) * (size(every, _EVERY[0], where, 1 << 10) - 1), FULL)
    return tuple(pattern[layer % len(pattern)] for layer in range(n_layers))
