"""Low-rank adapters of the projections of a model: y = x W + (alpha / rank) · (x A) B.

Training never computes the adapted weight. A [in…, rank] and B [rank, out…] lie beside their weight and are sharded as
its input and output axes. B starts at 0, so the model starts as its base.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from services.trainer.models.initial_weights import Leaves
from shared.errors import ConfigError
from shared.models import adapter

_LINEAR = "BTI,IO->BTO"


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Options of adapters; `target_modules` are the adapted projections, by Hugging Face's names."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class AdaptedProjection(nnx.Module):
    """Projection of Tunix with an adapter; its weight keeps its name.

    Args:
        einsum_str: inputs, weight -> outputs.
        name: of the weight in its module.
        sharding: mesh axis or None for each dimension of the weight.
    """

    def __init__(
        self,
        einsum_str: str,
        name: str,
        weight: nnx.Param[Any],
        sharding: tuple[str | None, ...],
        options: LoraOptions,
        dtype: Any,
    ) -> None:
        inputs, w, outputs = einsum_str.replace("->", ",").split(",")
        given = [axis for axis in w if axis not in outputs]
        made = [axis for axis in w if axis in outputs]
        lead = inputs[: len(inputs) - len(given)]
        self.einsum_str, self.name, self.scale, self.dtype = einsum_str, name, options.scale, dtype
        self.down, self.up = f"{inputs},{''.join(given)}r->{lead}r", f"{lead}r,r{''.join(made)}->{outputs}"
        setattr(self, name, weight)
        size, axes = dict(zip(w, weight.get_value().shape, strict=True)), dict(zip(w, sharding, strict=True))
        for side, dims in ((adapter.a_name(name), [*given, "r"]), (adapter.b_name(name), ["r", *made])):
            zeros = jnp.zeros([size.get(d, options.rank) for d in dims], jnp.float32)
            setattr(self, side, nnx.Param(zeros, out_sharding=tuple(axes.get(d) for d in dims)))

    def __call__(self, x: Any) -> jax.Array:
        x = jnp.asarray(x, self.dtype)
        w, a, b = (
            jnp.asarray(getattr(self, name).get_value(), self.dtype)
            for name in (self.name, adapter.a_name(self.name), adapter.b_name(self.name))
        )
        low = jnp.einsum(self.down, x, a)
        return jnp.einsum(self.einsum_str, x, w) + self.scale * jnp.einsum(self.up, low, b)


def adapt(model: Any, options: LoraOptions) -> None:
    """Add adapters to the projections of every layer, in place. Experts get none.

    Parameters of the base are cast to the activations' dtype, because they are published in it and stay fixed.

    Raises ConfigError if no projection of the model would get an adapter.
    """
    dtype, adapted = model.config.dtype, 0
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        variable.set_value(variable.get_value().astype(dtype))
    for layer in model.layers:
        for part in (layer.attn, layer.mlp):
            for target in options.target_modules:
                projection = getattr(part, target, None)
                if projection is not None and not isinstance(projection, nnx.Param):
                    setattr(part, target, _adapted(projection, options, dtype))
                    adapted += 1
    if not adapted:
        raise ConfigError(
            f"trainer.lora.target_modules={list(options.target_modules)} names no projection of this model that can"
            " have adapters",
            "experts have none: name q_proj, k_proj, v_proj or o_proj",
        )


def _adapted(projection: Any, options: LoraOptions, dtype: Any) -> AdaptedProjection:
    name, einsum_str = ("w", projection.einsum_str) if hasattr(projection, "w") else ("kernel", _LINEAR)
    weight = getattr(projection, name)
    return AdaptedProjection(einsum_str, name, weight, weight.get_metadata()["out_sharding"], options, dtype)


def initial_adapter(leaves: Leaves, seed: int) -> Leaves:
    """Leaves of the base, and initial leaves of adapters.

    A is uniform within ±1/√(inputs), as in PEFT, with a generator per leaf; B is 0, so the adapters change nothing.
    """

    def leaf(name: str, size: tuple[int, ...]) -> np.ndarray:
        if not adapter.is_adapter(name):
            return leaves(name, size)
        if adapter.is_b(name):
            return np.zeros(size, np.float32)
        bound = 1 / math.sqrt(math.prod(size[:-1]))
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        return rng.uniform(-bound, bound, size).astype(np.float32)

    return leaf
