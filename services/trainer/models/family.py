"""Models of every family on a mesh: shapes, parameters and their sharding. The forward pass is in `decoder`.

Every model carries the configuration that it was made from as `described`.

Invariant: parameters under training are float32 under Tunix's names, whatever the activations are.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from flax import nnx

from services.trainer.models.initial_weights import Leaves
from services.trainer.models.lora import LoraOptions, adapt
from services.trainer.models.options import Remat
from services.trainer.models.sharding import place
from services.trainer.models.splash import KernelAttention
from shared.errors import ConfigError
from shared.models.config import ModelConfig

_DETERMINISTIC = "--xla_gpu_deterministic_ops"
_AT_ONCE = "--xla_cpu_enable_concurrency_optimized_scheduler"
_CUDA = ("jax_cuda12_plugin", "jax_cuda13_plugin")

type Model = Any
"""An nnx module of Tunix with `embedder`, `layers`, `final_norm`, `lm_head` where embeddings are not tied, and
`config.dtype`."""


def make_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> jax.sharding.Mesh:
    """Make a mesh over the first prod(shape) devices; an axis of Tunix that is not named has size 1.

    Opens JAX's devices if nothing has before: GPUs so that they compute equal bits in every process, CPUs so that they
    compute in little memory.

    Raises ConfigError if there are too few devices.
    """
    reproduce_on_gpus()
    compute_in_order()
    absent = tuple(axis for axis in ("fsdp", "tp") if axis not in axis_names)
    shape, axis_names = (*shape, *(1 for _ in absent)), (*axis_names, *absent)
    n, have = int(np.prod(shape)), jax.device_count()
    if n > have:
        raise ConfigError(
            f"trainer.mesh.shape={list(shape)} needs {n} devices, {have} are here", "choose a smaller mesh"
        )
    axis_types = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, axis_names, axis_types=axis_types, devices=jax.devices()[:n])


def reproduce_on_gpus() -> None:
    """Let XLA compile for GPUs only kernels that add in a fixed order, unless XLA_FLAGS says otherwise.

    A restarted trainer repeats logged steps and compares checksums; by default sums of gradients depend on timing.
    Has no effect once JAX has opened its devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_platforms != "cpu" and _DETERMINISTIC not in flags and any(map(find_spec, _CUDA)):
        os.environ["XLA_FLAGS"] = f"{flags} {_DETERMINISTIC}=true".strip()


def compute_in_order() -> None:
    """Let XLA compile programs for CPUs that compute each value when it is needed, unless XLA_FLAGS says otherwise.

    By default they compute all that they can at once: a program that converts matrices to another dtype holds all of
    them converted, before its first product. No bit of a result differs. Has no effect once JAX has opened its devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _AT_ONCE not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_AT_ONCE}=false".strip()


def build(
    model: ModelConfig,
    leaves: Leaves,
    mesh: jax.sharding.Mesh,
    *,
    dtype: str,
    remat: Remat = "none",
    lora: LoraOptions | None = None,
    splash: KernelAttention | None = None,
) -> Model:
    """Build a model with float32 parameters, sharded over `mesh`.

    With a float32 `dtype` all later products of this process are computed in float32: on accelerators JAX by default
    rounds their inputs, to TF32 on GPUs and to bfloat16 on TPUs.

    Args:
        dtype: of activations.
        lora: add adapters in float32; parameters of the base have `dtype`.
        splash: kernels of attention, used in rows whose shape allows it.

    Raises ConfigError if a dimension does not divide over its mesh axis, or a tensor is missing.
    """
    if dtype == "float32" and mesh.devices.flat[0].platform != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")
    graph, state = abstract(model, dtype, remat, mesh, lora, splash=splash)
    return nnx.merge(graph, fill(state, leaves, mesh))


def float32_graph(model: Model) -> Any:
    """Make the graph of the model with float32 activations, without splash attention."""
    mesh = model.embedder.input_embedding.get_value().sharding.mesh
    return abstract(model.described, "float32", model.config.remat_config.name.lower(), mesh, model.lora)[0]


def abstract(
    model: ModelConfig,
    dtype: str,
    remat: Any,
    mesh: jax.sharding.Mesh,
    lora: LoraOptions | None = None,
    *,
    splash: KernelAttention | None = None,
) -> tuple[Any, Any]:
    """Make graph and state of a model, with shapes only."""
    from services.trainer.models.construction import create  # Tunix's model takes a second to import

    def make() -> Model:
        made: Any = create(model, dtype, remat)
        made.described, made.lora = model, lora
        for layer in made.layers if splash else ():
            layer.attn.splash = splash
        if lora is not None:
            adapt(made, lora)
        return made

    with mesh:
        return nnx.split(nnx.eval_shape(make))


def fill(state: Any, leaves: Leaves, mesh: jax.sharding.Mesh) -> Any:
    """Fill an nnx state with `leaves`, cast to their dtypes and placed on the mesh."""
    filled = []
    for path, variable in nnx.to_flat_state(state):
        name = leaf_name(path)
        target = variable.get_value()
        sharding = _sharding(name, target.shape, variable, mesh)
        filled.append((path, variable.replace(place(leaves(name, target.shape), sharding, target.dtype))))
    return nnx.from_flat_state(filled)


def leaf_name(path: tuple[Any, ...]) -> str:
    """("layers", 0, "attn", "q_proj", "w") -> layers.0.attn.q_proj.w"""
    return ".".join(str(part) for part in path)


def _sharding(name: str, size: tuple[int, ...], variable: Any, mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    axes = variable.get_metadata()["out_sharding"]
    for dim, axis in zip(size, axes, strict=False):
        if axis is not None and dim % mesh.shape[axis]:
            raise ConfigError(
                f"parameter {name} of shape {list(size)} does not divide over {axis}={mesh.shape[axis]}",
                "change trainer.mesh.shape",
            )
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def head(model: Model) -> jax.Array:
    """Output projection [V, D] in the activations' dtype: tied embeddings, or the transpose of lm_head [D, V]."""
    tied = model.described.tie_word_embeddings
    weight = model.embedder.input_embedding.get_value() if tied else model.lm_head.w.get_value().T
    return weight.astype(model.config.dtype)
