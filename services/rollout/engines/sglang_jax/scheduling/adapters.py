"""Low-rank adapters of the engine's linear layers: y = x W + scale · (x A) B, as the trainer computes them.

The engine never adds A B to W. Training changes W by less than half a unit in its last place, which a bfloat16 sum
rounds away: the engine would sample from another policy than the one that is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.linear import LinearBase

from shared.errors import WeightsError

type Linear = Callable[..., tuple[jax.Array, jax.Array | nnx.Param | None]]
_WEIGHT = ".weight"


class LoraMatrices(NamedTuple):
    """Matrices a [in, rank] and b [rank, out] in the engine's dtype, and `scale`, float32 []."""

    a: jax.Array
    b: jax.Array
    scale: jax.Array


type Adapters = dict[str, LoraMatrices]
"""Adapters by the dotted name of their weight."""


class EngineWeights(NamedTuple):
    """Arrays that a step computes with: the model's leaves in the runner's order, and adapters."""

    leaves: list[jax.Array]
    adapters: Adapters

    @property
    def arrays(self) -> list[jax.Array]:
        return [*self.leaves, *jax.tree.leaves(self.adapters)]


def attach(model: Any, adapters: Adapters) -> None:
    """Give layers of the model their adapters. The model must be one of this trace, because it is changed."""
    for name, one in adapters.items():
        _layer(model, name).adapter = nnx.data(one)


def adapter_of(model: Any, name: str, a: np.ndarray, b: np.ndarray, scale: float) -> LoraMatrices:
    """Put an adapter of a weight on its devices. Raises WeightsError for a weight that can have none.

    Args:
        a, b: [in, rank] and [rank, out].
    """
    layer = _layer(model, name)
    if not isinstance(layer, LinearBase):
        raise WeightsError(f"the engine supports no adapter for {name}", "remove its projection from target_modules")
    given, made = layer.kernel_axes or (None, None)
    dtype, mesh = layer.weight.value.dtype, layer.mesh
    return LoraMatrices(
        jax.device_put(a.astype(dtype), NamedSharding(mesh, P(given, None))),
        jax.device_put(b.astype(dtype), NamedSharding(mesh, P(None, made))),
        jax.device_put(np.float32(scale), NamedSharding(mesh, P())),
    )


def adapted(linear: Linear) -> Linear:
    """Wrap `LinearBase.__call__` to add the output of the layer's adapter, if it has one."""

    def call(
        layer: LinearBase, x: jax.Array, *, out_sharding: jax.sharding.Sharding | None = None
    ) -> tuple[jax.Array, jax.Array | nnx.Param | None]:
        out, bias = linear(layer, x, out_sharding=out_sharding)
        adapter: LoraMatrices | None = getattr(layer, "adapter", None)
        return (out if adapter is None else out + _output(layer, x, adapter, out_sharding).astype(out.dtype)), bias

    return call


def _output(layer: LinearBase, x: jax.Array, adapter: LoraMatrices, target: jax.sharding.Sharding | None) -> jax.Array:
    """Compute scale · (x A) B, float32."""
    assert layer.kernel_axes is not None
    middle = ["data", *([None] * (x.ndim - 2))]
    low = _product(x, adapter.a, NamedSharding(layer.mesh, P(*middle, None))).astype(x.dtype)
    made = target or NamedSharding(layer.mesh, P(*middle, layer.kernel_axes[-1]))
    return adapter.scale * _product(low, adapter.b, made)


def _product(x: jax.Array, w: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    inner = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, w, inner, preferred_element_type=jnp.float32, out_sharding=sharding)


def _layer(model: Any, name: str) -> Any:
    """Find the layer of a weight: model.layers.0.self_attn.q_proj.weight."""
    return reduce(_part, name.removesuffix(_WEIGHT).split("."), model)


def _part(of: Any, name: str) -> Any:
    return of[int(name)] if name.isdecimal() else getattr(of, name, None)
