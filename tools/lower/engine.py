"""Compile the engine's step for TPUs without having any: `python -m tools.lower.engine CONFIG.yaml TOPOLOGY LAYERS …`.

XLA_FLAGS must make as many CPU devices as the engine needs. The engine boots on the CPU as it would on TPUs, with pages
of 16 tokens and a model of so few LAYERS that it fits into memory. Shapes and shardings of a step's arguments are moved
to the topology's mesh. The last line is a JSON list with an object per program: bytes on each device, from the
compiler. With `gpu` as TOPOLOGY the step is lowered for GPUs, but not compiled.
"""

from __future__ import annotations

import copy
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orjson
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttention
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.model_loader.arch import get_model_architecture

from services.rollout import settings
from services.rollout.engines.base import EngineSpec
from services.rollout.engines.sglang_jax.boot import build_scheduler
from services.rollout.engines.sglang_jax.link import EngineLink
from services.rollout.engines.sglang_jax.scheduling.inputs import SamplingRows
from services.rollout.engines.sglang_jax.scheduling.scheduler import RolloutScheduler
from services.rollout.engines.sglang_jax.scheduling.step import compiled_step
from shared import config
from shared.models.config import CONFIG, ModelConfig

_POOL_TOKENS = 2**16
_KERNEL = re.compile(r"__gpu\$xla\.gpu\.triton.*?name = \"(\w+)\"")


def main(configuration: Path, topology: str, n_layers: int, overrides: Sequence[str]) -> list[dict[str, Any]]:
    spec = settings.from_config(config.load([configuration], list(overrides)).config).engine
    model = replace(ModelConfig.read(Path(spec.model_path)), num_hidden_layers=n_layers)
    with tempfile.TemporaryDirectory(prefix="volley-lowering-") as folder:
        (Path(folder) / CONFIG).write_bytes(orjson.dumps(model.to_hf()))
        spec = replace(spec, model_path=folder, max_total_tokens=_POOL_TOKENS)
        if topology == "gpu":
            return list(lowered_for_gpus(replace(spec, device="gpu")))
        scheduler = booted(replace(spec, device="tpu"))
        return list(compiled(scheduler, topologies.get_topology_desc(topology, platform="tpu").devices))


def booted(spec: EngineSpec) -> RolloutScheduler:
    """Boot the scheduler on this CPU with a TPU's paged attention; only its shapes are used."""
    ours, _ = socket.socketpair()
    scheduler = build_scheduler(spec, EngineLink(ours), None, runs_on="cpu")
    runner = scheduler.runner
    runner.attn_backend = FlashAttention(
        runner.num_attn_heads, runner.num_kv_heads, runner.model_config.head_dim, runner.page_size, mesh=runner.mesh
    )
    return scheduler


def lowered_for_gpus(spec: EngineSpec) -> Iterator[dict[str, Any]]:
    """Lower the largest prefill and the largest decode for CUDA; count their kernels of each kind, and their loops."""
    ours, _ = socket.socketpair()
    scheduler = build_scheduler(spec, EngineLink(ours), None, runs_on="cpu")
    runner = scheduler.runner
    for name, batch in _largest(scheduler):
        arguments = scheduler.step.arguments(batch, SamplingRows(len(batch.seq_lens)))
        with jax.set_mesh(runner.mesh):
            step = compiled_step(runner.mesh, runner._model_def, runner._model_state_def)
            text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        yield {"program": name, "kernels": Counter(_KERNEL.findall(text)), "loops": text.count("stablehlo.while")}


def compiled(scheduler: RolloutScheduler, devices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Compile the largest prefill and the largest decode."""
    for name, batch in _largest(scheduler):
        start = time.perf_counter()
        made = lowered(scheduler, batch, devices).compile()
        found = made.memory_analysis()
        parts = {
            "arguments": found.argument_size_in_bytes,
            "results": found.output_size_in_bytes - found.alias_size_in_bytes,
            "temporary": found.temp_size_in_bytes,
        }
        took_s = round(time.perf_counter() - start, 1)
        flops = (made.cost_analysis() or {}).get("flops")
        yield {"program": name, "bytes": parts, "flops": flops, "compile_s": took_s}


def _largest(scheduler: RolloutScheduler) -> Iterator[tuple[str, Any]]:
    """Batches of the largest prefill and the largest decode, with a name."""
    manager = scheduler.tp_worker.compilation_manager
    most, tokens, cache = manager.max_padded_batch_size, manager.token_buckets[-1], manager.cache_loc_buckets[-1]
    for name, mode, n in (("prefill", ForwardMode.EXTEND, tokens), ("decode", ForwardMode.DECODE, most)):
        batch = manager._make_dummy_batch(most, n, mode, cache, dp_size=1, per_dp_bs_size=most)
        yield f"{name} of {n} tokens", batch


def lowered(scheduler: RolloutScheduler, batch: Any, devices: Sequence[Any]) -> jax.stages.Lowered:
    """Lower the step for the first of `devices`, as many as the engine has."""
    runner = scheduler.runner
    there = _moved(runner.mesh, devices)
    model_class, _ = get_model_architecture(runner.model_config)
    with jax.set_mesh(there):
        shapes = nnx.eval_shape(
            lambda: model_class(runner.model_config.hf_config, dtype=runner.model_config.dtype, mesh=there)
        )
    leaves, pools, attention, *rest, layout = scheduler.step.arguments(batch, SamplingRows(len(batch.seq_lens)))
    attention = copy.copy(attention)
    attention.mesh = there
    arguments = jax.tree.map(lambda x: _as_shape(x, there, devices), (leaves, pools, attention, *rest))
    step = compiled_step(there, nnx.split(shapes)[0], runner._model_state_def)
    with jax.set_mesh(there), _asked_for(devices):
        return step.lower(*arguments, layout)


def _moved(mesh: Mesh, devices: Sequence[Any]) -> Mesh:
    """Make the same mesh over the first of `devices`."""
    chosen = np.array(devices[: mesh.size]).reshape(mesh.devices.shape)
    return Mesh(chosen, mesh.axis_names, axis_types=mesh.axis_types)


def _as_shape(x: Any, mesh: Mesh, devices: Sequence[Any]) -> Any:
    """Shape of an array, with its sharding over `devices`: experts have a mesh of their own."""
    if not hasattr(x, "shape"):
        return x
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        moved = NamedSharding(_moved(sharding.mesh, devices), sharding.spec)
    else:
        moved = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=moved)


@contextmanager
def _asked_for(devices: Sequence[Any]) -> Iterator[None]:
    """Replace `jax.devices()`: the engine's kernels choose their blocks by the kind of its first device."""
    real = jax.devices
    jax.devices = lambda *_: list(devices)
    try:
        yield
    finally:
        jax.devices = real


if __name__ == "__main__":
    report = main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    sys.stdout.write(orjson.dumps(report).decode() + "\n")
