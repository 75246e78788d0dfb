"""Compile the trainer's step for TPUs without having any: `python -m tools.lower.trainer CONFIG.yaml TOPOLOGY …`.

Compiles the functions of `Learner` with shapes in place of arrays. The last line is a JSON list with an object per
program: bytes on each device, from the compiler.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orjson
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from services.trainer import options
from services.trainer.learner.optimizer import make_optimizer
from services.trainer.learner.policy import PolicyOptions
from services.trainer.learner.scoring import divided, objective, params_of
from services.trainer.learner.shapes import micro_batch
from services.trainer.learner.train_step import ROW_AXES, Params, applied, gradient
from services.trainer.models.family import Model, abstract
from services.trainer.models.options import ModelOptions
from services.trainer.models.splash import splash_kernels
from services.trainer.settings import TokenLimits
from shared import config
from shared.models.config import ModelConfig
from shared.models.hub import model_folder


def main(configuration: Path, topology: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    loaded = config.load([configuration], list(overrides)).config
    folder = model_folder(loaded.model.path)
    described = ModelConfig.read(folder)
    policy = options.policy_options(loaded, TokenLimits(described.vocab_size, 0))
    model = options.model_options(loaded, folder)
    mesh = _mesh(model, topology)
    return [_compiled(program, mesh) for program in programs(described, model, policy, mesh)]


@dataclass(frozen=True, slots=True)
class Program:
    """A function of the step, and the shapes of its arguments.

    `waiting`: bytes on each device of data that is there meanwhile but is not an argument, by name.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    waiting: Mapping[str, int]


def programs(
    described: ModelConfig, model: ModelOptions, policy: PolicyOptions, mesh: jax.sharding.Mesh
) -> list[Program]:
    """The gradient of the largest micro-batch, and the optimizer's update."""
    shapes = sharded(described, model, mesh)
    trained, frozen = divided(params_of(shapes))
    optimizer = make_optimizer(policy.optimizer)
    entropy = "gradient" if policy.algorithm.needs.entropy else "value"
    of_batch = gradient(objective(shapes, policy.algorithm.loss, policy.temperature, entropy))
    batch = _as_shapes(micro_batch(described, model, policy, policy.layout.rows), mesh, ROW_AXES)
    state = _optimizer_state(optimizer, trained, mesh)
    like, of_state = (jax.tree.map(lambda x: x.sharding, tree) for tree in (trained, state))
    waiting = {"optimizer": _bytes(state)}
    if policy.layout.n_micro(policy.rows_per_step) > 1:
        waiting["gradients so far"] = _bytes(trained)
    update = jax.jit(applied(optimizer), donate_argnums=(0, 1), out_shardings=(like, of_state))
    return [
        Program("gradient", jax.jit(of_batch, out_shardings=(None, like)), (trained, frozen, batch), waiting),
        Program("optimizer", update, (trained, state, trained), {"frozen": _bytes(frozen)}),
    ]


def sharded(described: ModelConfig, model: ModelOptions, mesh: jax.sharding.Mesh) -> Model:
    """Model with shapes in place of arrays, each with its sharding on the mesh."""
    splash = splash_kernels(model.attention, mesh, "tpu")
    graph, state = abstract(described, model.dtype, model.remat, mesh, model.lora, splash=splash)
    flat = []
    for path, variable in nnx.to_flat_state(state):
        value, axes = variable.get_value(), variable.get_metadata()["out_sharding"]
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        flat.append((path, variable.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _mesh(model: ModelOptions, topology: str) -> jax.sharding.Mesh:
    """Mesh over the first devices of the topology."""
    n = int(np.prod(model.mesh_shape))
    absent = tuple(axis for axis in ("fsdp", "tp") if axis not in model.mesh_axes)
    shape, axes = (*model.mesh_shape, *(1 for _ in absent)), (*model.mesh_axes, *absent)
    devices = topologies.get_topology_desc(topology, platform="tpu").devices[:n]
    return jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes), devices=devices)


def _as_shapes(tree: Any, mesh: jax.sharding.Mesh, axes: tuple[str, ...] = ()) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _optimizer_state(optimizer: Any, trained: Params, mesh: jax.sharding.Mesh) -> Any:
    """Shapes of the optimizer's state: moments are sharded as their parameters, scalars are replicated."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(path: Sequence[Any], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = getattr(path[-1], "key", None)
        like = trained[name].sharding if name in trained else everywhere
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like)

    return jax.tree_util.tree_map_with_path(placed, jax.eval_shape(optimizer.init, trained))


def _bytes(tree: Any) -> int:
    """Bytes of the arrays on each device."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _compiled(program: Program, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    start = time.perf_counter()
    with mesh:
        made = program.function.lower(*program.arguments).compile()
    found = made.memory_analysis()
    parts = {
        "arguments": found.argument_size_in_bytes,
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
        **program.waiting,
    }
    flops = (made.cost_analysis() or {}).get("flops")
    return {"program": program.name, "bytes": parts, "flops": flops, "compile_s": round(time.perf_counter() - start, 1)}


if __name__ == "__main__":
    sys.stdout.write(orjson.dumps(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])).decode() + "\n")
