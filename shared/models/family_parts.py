"""Parts that only some families have, read from a config.json: experts, and variants of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from shared.errors import ConfigError
from shared.models.family import SLIDING, Family
from shared.models.values import boolean, number, shorten, size

_MOST_EXPERTS, _MOST_SIZE, _MOST_CAP = 1 << 16, 1 << 30, 1e6


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts in every layer, under the names of a config.json. With `norm_topk_prob` the weights of the
    chosen experts add up to 1.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool

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
        return cls(n, per_token, inner, boolean(given.get("norm_topk_prob", False), "norm_topk_prob", where))


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Variants of attention and logits, under the names of a config.json; None: plain, as all other families.

    Attributes:
        query_pre_attn_scalar: attention scores are divided by its square root, instead of √head_dim.
        sliding_window: number of tokens that a token sees in layers of type `sliding_attention`, itself included.
        layer_types: type of each layer; repeats if the model has more layers.
        attn_logit_softcapping: cap c of attention scores c · tanh(x / c).
        final_logit_softcapping: cap of the logits.
    """

    query_pre_attn_scalar: int | None
    sliding_window: int | None
    layer_types: tuple[str, ...]
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None

    @classmethod
    def parse(cls, given: Mapping[str, Any], family: Family, n_layers: int, where: str) -> Self | None:
        """Read the variants that the family computes; None if it has none. Raises ConfigError."""
        if family.attention is None:
            return None
        computed = family.attention

        def whole(key: str) -> int | None:
            return size(given.get(key, computed[key]), key, where, _MOST_SIZE) if key in computed else None

        def cap(key: str) -> float | None:
            value = given.get(key, computed.get(key))
            return None if value is None else number(value, key, where, _MOST_CAP)

        scores, logits = cap("attn_logit_softcapping"), cap("final_logit_softcapping")
        scalar, window = whole("query_pre_attn_scalar"), whole("sliding_window")
        pattern = family.layer_types
        kinds = given.get("layer_types") or [pattern[layer % len(pattern)] for layer in range(n_layers)]
        return cls(scalar, window, tuple(kinds), scores, logits)

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
        return {key: value for key, value in written.items() if key in ("layer_types", *(family.attention or ()))}

    def _kind(self, layer: int) -> str:
        return self.layer_types[layer % len(self.layer_types)]
