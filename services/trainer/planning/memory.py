"""Estimate of the memory that training takes, before anything is loaded or compiled.

Parameters, optimizer state, gradients and copies are counted by their shapes and shardings. The activations of a
micro-batch come from the traced gradient function: the most bytes that are live at once if its operations run in order.
XLA fuses and reorders operations; `docs/memory.md` says how far it is from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend import core

from services.trainer.batches.batch import BatchLayout, micro_batches, routed_dtype, supervised_row
from services.trainer.learner.policy import PolicyOptions
from services.trainer.learner.scoring import divided, objective, params_of
from services.trainer.learner.train_step import gradient
from services.trainer.models.family import Model, abstract, make_mesh
from services.trainer.models.lora import LoraOptions
from services.trainer.models.options import ModelOptions, Remat
from services.trainer.models.splash import uses_splash
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.parameters import parameters
from shared.planning import training
from shared.planning.training import MemoryEstimate, TrainingSetup
from shared.process.host_memory import host_limit, resident

_OPERATIONS = (
    "abs add add_any and broadcast_in_dim clamp convert_element_type copy cos div eq exp exp2 expand_dims ge gt "
    "integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pad pow rem reshape rsqrt select_n "
    "sign sin sqrt square squeeze stop_gradient sub tanh"
)
_ELEMENTWISE = frozenset(_OPERATIONS.split())
_REDUCTIONS = frozenset({"argmax", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"})
_TRACED = (2, 3)  # numbers of layers that are traced; each further layer adds as much as the third
_MIB = 2**20
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def estimate(
    described: ModelConfig, model: ModelOptions, policy: PolicyOptions, warm_start: BatchLayout | None = None
) -> MemoryEstimate:
    """Estimate the memory of training.

    Args:
        warm_start: layout of the warm start, if there is one.

    Raises ConfigError if the mesh has more devices than there are.
    """
    mesh, lora, critic = make_mesh(model.mesh_shape, model.mesh_axes), model.lora, policy.critic
    setup = TrainingSetup(
        mesh=dict(mesh.shape),
        dtype=model.dtype,
        published_dtype=policy.published_dtype,
        adapts=lora is not None,
        reference=policy.algorithm.needs.reference,
        offload_reference=policy.offload_reference,
        has_critic=critic is not None,
        trains_attention=critic is None or critic.trains_attention,
        n_micro=policy.layout.n_micro(policy.rows_per_step),
        may_branch=policy.tunix is None,
        on_host=jax.devices()[0].platform == "cpu",
    )
    shapes = parameters(described, lora.rank, lora.target_modules) if lora else parameters(described)
    activations = _activations(described, model, policy)
    batch = micro_batch(described, model, policy, _rows_of_device(model, policy))
    step = {
        "activations": activations,
        "micro-batch": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch)),
    }
    if policy.tunix is not None:
        step["logits of Tunix's loss"] = 4 * training.TUNIX_LOGITS * batch.ids.size * described.vocab_size
    warming = None if warm_start is None else round(activations * warm_start.rows / policy.layout.rows)
    return training.estimate(shapes, setup, step, warming)


def check(found: MemoryEstimate, limit: int, on: str, helps: Callable[[], Sequence[tuple[str, int]]]) -> None:
    """Raise ConfigError if training does not fit into the `limit` bytes of `on`.

    The hint lists the settings of `helps` and the bytes that each saves.
    """
    if found.peak <= limit:
        return
    parts = ", ".join(f"{name} {value:,.0f}" for name, value in found.to_mib().items())
    knobs = sorted(((saved, knob) for knob, saved in helps() if saved > 0), reverse=True)
    hint = ", ".join(f"{knob} (saves {saved / _MIB:,.0f} MiB)" for saved, knob in knobs)
    raise ConfigError(
        f"training takes {found.peak / _MIB:,.0f} MiB and {on} has {limit / _MIB:,.0f} MiB for it; in MiB: {parts}",
        hint or "choose a smaller model, or a mesh of more devices",
    )


def knobs(
    described: ModelConfig,
    model: ModelOptions,
    policy: PolicyOptions,
    warm_start: BatchLayout | None,
    found: MemoryEstimate,
) -> list[tuple[str, int]]:
    """List settings that would lower the peak, and by how many bytes each does alone."""
    shards = dict(zip(model.mesh_axes, model.mesh_shape, strict=True)).get("fsdp", 1)
    tries: list[tuple[str, ModelOptions, PolicyOptions]] = []
    if policy.layout.rows > shards:
        tokens = shards * policy.layout.buckets[-1] if policy.layout.tokens else None
        small = replace(policy, layout=replace(policy.layout, rows=shards, tokens=tokens))
        knob = f"micro_batch_tokens={tokens}" if tokens else f"train_micro_batch_size={shards}"
        tries.append((f"trainer.{knob}", model, small))
    policies: dict[Remat, int] = {"none": 0, "block": 1, "decoder": 2}
    for remat, rank in policies.items():
        if rank > policies[model.remat]:
            tries.append((f"model.remat={remat}", replace(model, remat=remat), policy))
    if model.lora is None:
        lora = LoraOptions(16, 32.0, _PROJECTIONS)
        tries.append(("trainer.lora.rank=16", replace(model, lora=lora), policy))
    if model.dtype == "float32":
        half = replace(policy, published_dtype="bfloat16")
        tries.append(("model.dtype=bfloat16", replace(model, dtype="bfloat16"), half))
    made = [(knob, found.peak - _tried(described, m, p, warm_start).peak) for knob, m, p in tries]
    if found.kept["reference"]:
        made.append(("algorithm.beta=0", found.kept["reference"]))
        if not found.on_host:
            made.append(("trainer.offload_reference=true", found.kept["reference"]))
    return made


def _tried(
    described: ModelConfig, model: ModelOptions, policy: PolicyOptions, warm_start: BatchLayout | None
) -> MemoryEstimate:
    if warm_start is not None:
        warm_start = replace(warm_start, rows=min(warm_start.rows, policy.layout.rows))
    return estimate(described, model, policy, warm_start)


def available(device: jax.Device) -> tuple[int, str]:
    """Return the bytes that training may take, and the name of the device or host that limits them.

    A device that reports no limit uses the memory of this machine or container, less what this process already has.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]), str(device)
    limit, on = host_limit()
    return limit - resident(), on


def _activations(described: ModelConfig, model: ModelOptions, policy: PolicyOptions) -> int:
    """Estimate the bytes on a device for the largest micro-batch, whose rows are divided over fsdp."""
    n = described.num_hidden_layers
    if n <= _TRACED[1]:
        return _traced(described, model, policy)
    fewer, more = (_traced(replace(described, num_hidden_layers=layers), model, policy) for layers in _TRACED)
    return more + (n - _TRACED[1]) * (more - fewer)


def _traced(described: ModelConfig, model: ModelOptions, policy: PolicyOptions) -> int:
    of_batch, shapes = of_micro_batch(described, model, policy)
    return live_bytes(jax.make_jaxpr(of_batch)(*shapes).jaxpr)


def of_micro_batch(described: ModelConfig, model: ModelOptions, policy: PolicyOptions) -> tuple[Any, tuple[Any, ...]]:
    """Return the gradient function of one device of the mesh, and its arguments as shapes."""
    mesh = make_mesh((1, 1), ("fsdp", "tp"))
    splash = uses_splash(model.attention, mesh.devices.flat[0].platform)
    shapes: Model = nnx.merge(*abstract(described, model.dtype, model.remat, mesh, model.lora, splash=splash))
    entropy = "gradient" if policy.algorithm.needs.entropy else "value"
    of_batch = gradient(objective(shapes, policy.algorithm.loss, policy.temperature, entropy))

    def on_mesh(*given: Any) -> Any:
        with mesh:
            return of_batch(*given)

    batch = micro_batch(described, model, policy, _rows_of_device(model, policy))
    return on_mesh, (*divided(params_of(shapes)), batch)


def _rows_of_device(model: ModelOptions, policy: PolicyOptions) -> int:
    return policy.layout.rows // dict(zip(model.mesh_axes, model.mesh_shape, strict=True)).get("fsdp", 1)


def micro_batch(described: ModelConfig, model: ModelOptions, policy: PolicyOptions, n_rows: int) -> Any:
    """Make a micro-batch of `n_rows` of the longest bucket, as shapes."""
    needs, length = policy.algorithm.needs, policy.layout.buckets[-1]
    row, some = supervised_row([0] * length, [1] * length), np.zeros(length, np.float32)
    row = replace(row, reference=some if needs.reference else None, old=some if needs.old else None)
    row = replace(row, values=some, returns=some) if needs.values else row
    row = replace(row, observed=some) if needs.observations else row
    rows = [row] * max(1, n_rows)
    layout = replace(policy.layout, rows=len(rows), shards=1)
    layout = replace(layout, tokens=len(rows) * length) if layout.tokens else layout
    batch = max(micro_batches(rows, np.ones(len(rows)), layout, 1), key=lambda one: one.ids.size)
    shapes: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    if described.routing is None or not model.routing_replay:
        return shapes
    n_layers, _, k = described.routing
    routed = jax.ShapeDtypeStruct((*batch.ids.shape, n_layers, k), routed_dtype(described.routing.dtype))
    return replace(shapes, routed=routed)


def live_bytes(jaxpr: core.Jaxpr, *, outermost: bool = True) -> int:
    """Compute the most bytes of intermediate values that are live at once, if the equations run in order.

    Not counted: inputs, results of the outermost function, and values that one elementwise operation passes only to the
    next. The need of an equation's inner functions is added to the values live around it.
    """
    ends: dict[Any, int] = {}
    for i, equation in enumerate(jaxpr.eqns):
        ends |= {v: i for v in equation.invars if isinstance(v, core.Var)}
    results = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    ends |= dict.fromkeys(results, len(jaxpr.eqns))
    ending: dict[int, list[Any]] = {}
    for variable, i in ends.items():
        ending.setdefault(i, []).append(variable)
    uncounted, sizes, live, most = results if outermost else set[Any](), dict[Any, int](), 0, 0
    for i, equation in enumerate(jaxpr.eqns):
        made = {v: _bytes(v) for v in equation.outvars if v in ends and v not in uncounted}
        if i + 1 < len(jaxpr.eqns) and _is_merged(equation, jaxpr.eqns[i + 1]):
            made = {v: n for v, n in made.items() if ends[v] > i + 1}
        inner = max((live_bytes(one, outermost=False) for one in _functions(equation)), default=0)
        most = max(most, live + max(inner, sum(made.values())))
        sizes |= made
        live += sum(made.values()) - sum(sizes.pop(v, 0) for v in ending.get(i, ()))
    return most


def _is_merged(equation: Any, following: Any) -> bool:
    """True if XLA fuses the two into one loop."""
    return equation.primitive.name in _ELEMENTWISE and following.primitive.name in _ELEMENTWISE | _REDUCTIONS


def _functions(equation: Any) -> Iterator[core.Jaxpr]:
    for parameter in equation.params.values():
        for one in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one


def _bytes(variable: Any) -> int:
    value = variable.aval
    dtype = getattr(value, "dtype", None)
    return math.prod(value.shape) * dtype.itemsize if dtype is not None else 0
