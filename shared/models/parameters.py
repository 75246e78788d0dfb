"""Shapes of a model's parameters under the trainer's names, from its configuration alone.

They are those of the model that the trainer builds, with the mesh axis over which each dimension is sharded.
`shared.models.names` explains the names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from shared.models import adapter
from shared.models.config import ModelConfig

type Axes = tuple[str | None, ...]

_DOWN: Axes = ("tp", "fsdp")
_UP: Axes = ("fsdp", "tp")
_NORM: Axes = ("tp",)


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """Shape of a parameter. `axes` has the mesh axis of each dimension, or None for one that is not divided.

    The first `n_inputs` dimensions are those of the layer's input; 0 for a parameter that is no projection.
    """

    shape: tuple[int, ...]
    axes: Axes
    n_inputs: int = 0

    @property
    def n(self) -> int:
        return math.prod(self.shape)

    def n_on_device(self, mesh: Mapping[str, int]) -> int:
        """Numbers on each device of a mesh with these axis sizes."""
        return -(-self.n // math.prod(mesh.get(axis, 1) for axis in self.axes if axis is not None))

    def indivisible(self, mesh: Mapping[str, int]) -> str | None:
        """Find an axis of the mesh over which the shape does not divide."""
        pairs = zip(self.shape, self.axes, strict=True)
        return next((axis for size, axis in pairs if axis is not None and size % mesh.get(axis, 1)), None)


type Shapes = Mapping[str, ParameterShape]


@cache
def parameters(model: ModelConfig, rank: int | None = None, targets: tuple[str, ...] = ()) -> Shapes:
    """Shapes of all parameters by name. `rank` adds low-rank adapters of the projections `targets`."""
    vocabulary, hidden = model.vocab_size, model.hidden_size
    found = {"embedder.input_embedding": ParameterShape((vocabulary, hidden), _DOWN)}
    for layer in range(model.num_hidden_layers):
        for name, shape in (*_norms(model), *_attention(model), *_mlp(model, layer)):
            found[f"layers.{layer}.{name}"] = shape
    found["final_norm.w"] = ParameterShape((hidden,), _NORM)
    if not model.tie_word_embeddings:
        found["lm_head.w"] = ParameterShape((hidden, vocabulary), _UP)
    if rank is not None:
        found |= _adapters(found, rank, targets)
    return MappingProxyType(found)


def n_parameters(model: ModelConfig) -> int:
    """Number of parameters, without adapters."""
    return sum(shape.n for shape in parameters(model).values())


def _norms(model: ModelConfig) -> Iterator[tuple[str, ParameterShape]]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if model.family.output_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in names:
        yield f"{name}.w", ParameterShape((model.hidden_size,), _NORM)


def _attention(model: ModelConfig) -> Iterator[tuple[str, ParameterShape]]:
    if model.latent is not None:
        yield from _latent_attention(model)
        return
    hidden, size = model.hidden_size, model.head_dim
    heads = {"q": model.num_attention_heads, "k": model.num_key_value_heads, "v": model.num_key_value_heads}
    for name, n in heads.items():
        yield f"attn.{name}_proj.w", ParameterShape((hidden, n, size), ("fsdp", "tp", None), 1)
        if model.family.qkv_bias:
            yield f"attn.{name}_bias", ParameterShape((n * size,), ("tp",))
        if model.family.qk_norm and name != "v":
            yield f"attn.{name}_norm.w", ParameterShape((size,), _NORM)
    yield "attn.o_proj.w", ParameterShape((model.num_attention_heads, size, hidden), ("tp", None, "fsdp"), 2)


def _latent_attention(model: ModelConfig) -> Iterator[tuple[str, ParameterShape]]:
    sizes, heads, hidden = model.latent, model.num_attention_heads, model.hidden_size
    assert sizes is not None
    queries, rank = heads * sizes.qk_head_dim, sizes.q_lora_rank
    if rank is None:
        yield "attn.q_proj.kernel", ParameterShape((hidden, queries), _UP, 1)
    else:
        yield "attn.q_a_proj.kernel", ParameterShape((hidden, rank), ("fsdp", None), 1)
        yield "attn.q_a_layernorm.w", ParameterShape((rank,), _NORM)
        yield "attn.q_b_proj.kernel", ParameterShape((rank, queries), (None, "tp"), 1)
    latent, values = sizes.kv_lora_rank, heads * sizes.v_head_dim
    shared = ParameterShape((hidden, latent + sizes.qk_rope_head_dim), ("fsdp", None), 1)
    yield "attn.kv_a_proj_with_mqa.kernel", shared
    yield "attn.kv_a_layernorm.w", ParameterShape((latent,), _NORM)
    expanded = heads * sizes.qk_nope_head_dim + values
    yield "attn.kv_b_proj.kernel", ParameterShape((latent, expanded), (None, "tp"), 1)
    yield "attn.o_proj.kernel", ParameterShape((values, hidden), _DOWN, 1)


def _mlp(model: ModelConfig, layer: int) -> Iterator[tuple[str, ParameterShape]]:
    experts, hidden = model.experts, model.hidden_size
    if experts is None or layer < experts.first_k_dense_replace:
        yield from _feed_forward("mlp", hidden, model.intermediate_size)
        return
    n, size = experts.num_experts, experts.moe_intermediate_size
    yield "mlp.router.kernel", ParameterShape((hidden, n), (None, None))
    for name in ("gate_proj", "up_proj"):
        yield f"mlp.{name}", ParameterShape((n, hidden, size), ("fsdp", None, "tp"))
    yield "mlp.down_proj", ParameterShape((n, size, hidden), ("fsdp", "tp", None))
    if experts.shared_expert_intermediate_size is not None:
        yield from _feed_forward("mlp.shared_expert", hidden, experts.shared_expert_intermediate_size)
        yield "mlp.shared_expert_gate.kernel", ParameterShape((hidden, 1), (None, None))
    if experts.n_group is not None:
        yield "mlp.router_bias", ParameterShape((n,), (None,))
        yield from _feed_forward("mlp.shared_experts", hidden, experts.shared_size)


def _feed_forward(part: str, hidden: int, size: int) -> Iterator[tuple[str, ParameterShape]]:
    for name in ("gate_proj", "up_proj"):
        yield f"{part}.{name}.kernel", ParameterShape((hidden, size), _UP, 1)
    yield f"{part}.down_proj.kernel", ParameterShape((size, hidden), _DOWN, 1)


def _adapters(base: Shapes, rank: int, targets: Sequence[str]) -> Shapes:
    """Shapes of A and B of each projection of attention and of dense feed-forward parts that `targets` names."""
    found: dict[str, ParameterShape] = {}
    for name, one in base.items():
        parts = name.split(".")
        if not one.n_inputs or len(parts) != 5 or parts[3] not in targets:
            continue
        inputs, i = one.shape[: one.n_inputs], one.n_inputs
        found[adapter.a_name(name)] = ParameterShape((*inputs, rank), (*one.axes[:i], None))
        found[adapter.b_name(name)] = ParameterShape((rank, *one.shape[i:]), (None, *one.axes[i:]))
    return found
