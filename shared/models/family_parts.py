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
    """Mixture of experts, under the names of a config.json; `num_experts` is DeepSeek's `n_routed_experts`.

    Attributes:
        norm_topk_prob: the weights of the chosen experts add up to 1.
        shared_expert_intermediate_size: size of an expert beside them that computes every token, weighted by a gate of
            its own; None: there is none.
        n_shared_experts: number of experts beside them that compute every token, joined in one matrix.
        first_k_dense_replace: number of the first layers that are dense.
        n_group, topk_group: experts are in so many groups, of which a token may use so many; None: no groups.
        routed_scaling_factor: factor of the chosen experts' weights.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    shared_expert_intermediate_size: int | None = None
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0

    @classmethod
    def parse(cls, given: Mapping[str, Any], family: Family, where: str) -> Self | None:
        """Read the experts; None for a dense family. transformers 5 writes `num_local_experts`. Raises ConfigError."""
        if family.experts is None:
            return None
        named = next(key for key in ("num_experts", "n_routed_experts") if key in family.experts)
        spelled = {key: given[key] for key in (named, "num_local_experts") if key in given}
        if len({shorten(value) for value in spelled.values()}) > 1:
            raise ConfigError(f"{where}: {named} and num_local_experts differ", "keep the one of the weights")
        known = {**family.experts, **given} | ({named: next(iter(spelled.values()))} if spelled else {})
        n, per_token = (size(known[key], key, where, _MOST_EXPERTS) for key in (named, "num_experts_per_tok"))
        inner = size(known["moe_intermediate_size"], "moe_intermediate_size", where, 1 << 20)
        if per_token > n:
            raise ConfigError(f"{where}: num_experts_per_tok={per_token} is more than {named}={n}", "correct them")
        shared = known.get(_SHARED) if _SHARED in family.experts else None
        return cls(
            num_experts=n,
            num_experts_per_tok=per_token,
            moe_intermediate_size=inner,
            norm_topk_prob=boolean(known.get("norm_topk_prob", False), "norm_topk_prob", where),
            shared_expert_intermediate_size=None if shared is None else size(shared, _SHARED, where, 1 << 20),
            **(_grouped(known, n, per_token, where) if "n_group" in family.experts else {}),
        )

    def to_hf(self, family: Family) -> dict[str, Any]:
        """Keys of the family's config.json."""
        values = asdict(self) | {"n_routed_experts": self.num_experts}
        return {key: values[key] for key in (*(family.experts or ()), "norm_topk_prob")}

    @property
    def shared_size(self) -> int:
        """Size of all that computes every token; 0 if there is none."""
        return self.shared_expert_intermediate_size or self.n_shared_experts * self.moe_intermediate_size


def _grouped(known: Mapping[str, Any], n: int, per_token: int, where: str) -> dict[str, Any]:
    """Read what DeepSeek-V3 adds to a mixture of experts. Raises ConfigError."""
    groups, of_token = (size(known[key], key, where, _MOST_EXPERTS) for key in ("n_group", "topk_group"))
    if n % groups or n // groups < 2 or of_token > groups or per_token > of_token * (n // groups):
        raise ConfigError(
            f"{where}: n_group={groups} and topk_group={of_token} do not fit n_routed_experts={n} and"
            f" num_experts_per_tok={per_token}",
            "each group has two experts or more, and the groups of a token have enough of them",
        )
    dense = known["first_k_dense_replace"]
    return {
        "n_shared_experts": size(known["n_shared_experts"], "n_shared_experts", where, 1 << 10),
        "first_k_dense_replace": dense if dense == 0 else size(dense, "first_k_dense_replace", where, 1 << 10),
        "n_group": groups,
        "topk_group": of_token,
        "routed_scaling_factor": number(known["routed_scaling_factor"], "routed_scaling_factor", where, _MOST_CAP),
    }


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention of DeepSeek-V2, under the names of a config.json.

    Keys and values of all heads are projected from `kv_lora_rank` numbers of a token, queries from `q_lora_rank` (None:
    from the hidden state). The last `qk_rope_head_dim` numbers of a head's query are turned, and compared with a key
    that all heads share; the first `qk_nope_head_dim` are not turned.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def parse(cls, given: Mapping[str, Any], family: Family, where: str) -> Self | None:
        """Read the sizes; None for other families. Raises ConfigError."""
        if family.latent is None:
            return None
        known = {key: given.get(key, default) for key, default in family.latent.items()}
        of_queries = known.pop("q_lora_rank")
        sizes = {key: size(value, key, where, 1 << 20) for key, value in known.items()}
        return cls(None if of_queries is None else size(of_queries, "q_lora_rank", where, 1 << 20), **sizes)

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a head's query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def n_numbers(self, hidden: int, heads: int) -> int:
        """Number of parameters of a layer's attention."""
        rank, queries = self.q_lora_rank, heads * self.qk_head_dim
        of_queries = hidden * queries if rank is None else rank * (hidden + queries + 1)
        of_values = self.kv_lora_rank * (1 + heads * (self.qk_nope_head_dim + self.v_head_dim))
        return of_queries + hidden * (self.kv_lora_rank + self.qk_rope_head_dim + heads * self.v_head_dim) + of_values


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
