"""One step of the engine as one compiled call: model, sampling and log-probability together, one transfer back.

The engine's own path makes three calls and several transfers a step, and returns bfloat16 log-probabilities for
bfloat16 models. The weights are an argument of the compiled function, so new weights of the same shapes never
recompile.

A step may be launched before the one ahead of it has ended: input ids that the host does not know yet are negative, and
the device takes them from the tokens of that step (`future_token`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.eplb.expert_location import get_global_expert_location_metadata
from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch

from services.rollout.engines.base import MAX_TOP_LOGPROBS
from services.rollout.engines.sglang_jax.scheduling.adapters import Adapters, EngineWeights, attach
from services.rollout.engines.sglang_jax.scheduling.inputs import (
    Layout,
    SamplingRows,
    batch_of,
    blank,
    pack,
    unpack,
)
from services.rollout.engines.sglang_jax.scheduling.sampling import guided, most_likely, sample
from services.rollout.engines.sglang_jax.scheduling.shapes import KnownShapes
from shared.process.telemetry import Log

log = Log("engine")


class StepOutput[Array: (np.ndarray, jax.Array)](NamedTuple):
    """Results of one step, in numpy's arrays or on the device.

    B and T are the batch's padded numbers of requests and tokens.

    tokens_B: int32, sampled. logprobs_B: float32, of them. experts_TLK: uint16, the experts of each token, for a
    model with experts. top_ids_BN, top_logprobs_BN: int32 and float32, the most likely tokens, if a row asked for them.
    """

    tokens_B: Array
    logprobs_B: Array
    experts_TLK: Array | None
    top_ids_BN: Array | None
    top_logprobs_BN: Array | None


def future_token(row: Any) -> Any:
    """Return the negative input id that stands for the token that the preceding step samples in `row`."""
    return -1 - row


class FusedStep:
    """Runs batches on a model runner; owns the only reference to the serving weights' leaves besides the runner's.

    `adapters` are those of the serving weights.
    """

    def __init__(self, runner: Any, max_requests: int) -> None:
        """`max_requests`: the largest padded number of requests of a batch."""
        self._runner = runner
        self.adapters: Adapters = {}
        self.shapes = KnownShapes(None)
        self._sampled = jax.device_put(np.zeros(max_requests, np.int32), NamedSharding(runner.mesh, P(None)))
        model_def, _ = nnx.split(runner.model)
        self._compiled = compiled_step(runner.mesh, model_def, runner._model_state_def)

    @property
    def compilations(self) -> int:
        """Number of shapes compiled so far."""
        return self._compiled._cache_size()

    @property
    def weights(self) -> EngineWeights:
        """The serving weights."""
        return EngineWeights(self._runner.model_state_leaves, self.adapters)

    def __call__(
        self, batch: ModelWorkerBatch, rows: SamplingRows, weights: EngineWeights | None = None
    ) -> StepOutput[np.ndarray]:
        """Run the batch; `weights` are used instead of the serving ones."""
        return jax.device_get(self.launch(batch, rows, weights))

    def launch(
        self, batch: ModelWorkerBatch, rows: SamplingRows, weights: EngineWeights | None = None
    ) -> StepOutput[jax.Array]:
        """Start the batch on the device. The output's arrays are the device's; `jax.device_get` waits for them."""
        return self._launch(self.arguments(batch, rows, weights))

    def _launch(self, arguments: tuple[Any, ...]) -> StepOutput[jax.Array]:
        runner, before = self._runner, self.compilations
        with jax.set_mesh(runner.mesh):
            output, self._sampled, pool = self._compiled(*arguments)
        runner.memory_pools.replace_all(pool)
        if self.compilations > before:
            self.shapes.add(arguments[-1])
        return output

    def compile_next(self) -> bool:
        """Compile a shape that an earlier engine used, by a step without requests. Returns False if none is left.

        A shape that fails is forgotten. Raises the step's error if the step consumed the pool's buffers.
        """
        layout = self.shapes.next()
        if layout is None:
            return False
        try:
            jax.block_until_ready(self._launch((*self._fixed(None), blank(layout), layout)))
        except Exception as error:  # the file is damaged, or the shape does not fit into memory any more
            self.shapes.drop(layout)
            if any(array.is_deleted() for array in jax.tree.leaves(self._runner.memory_pools)):
                raise
            log.warning("a shape of an earlier engine cannot be compiled", error=repr(error))
        return True

    def arguments(
        self, batch: ModelWorkerBatch, rows: SamplingRows, weights: EngineWeights | None = None
    ) -> tuple[Any, ...]:
        """Build the arguments of the compiled function."""
        runner = self._runner
        metadata = runner.attn_backend.get_forward_metadata(batch)
        if metadata is not None:  # setting an attribute of a module walks what it holds
            runner.attn_backend.forward_metadata = metadata
        n_top = min(MAX_TOP_LOGPROBS, runner.model_config.vocab_size) if rows.with_top else 0
        return (*self._fixed(weights), *pack(batch, rows, n_top))

    def _fixed(self, weights: EngineWeights | None) -> tuple[Any, ...]:
        """Build the arguments that do not depend on the batch."""
        runner = self._runner
        return (
            weights or self.weights,
            runner.memory_pools,
            runner.attn_backend,
            get_global_expert_location_metadata(),
            self._sampled,
        )


def compiled_step(mesh: jax.sharding.Mesh, model_def: Any, state_def: Any) -> Any:
    """Return the step as a function to compile; it takes `FusedStep.arguments`."""

    @partial(jax.jit, donate_argnames=["memory_pools"], static_argnames=["layout"])
    def step(
        weights: EngineWeights,
        memory_pools: Any,
        attention: Any,
        places: Any,
        sampled_before: jax.Array,
        packed: jax.Array,
        layout: Layout,
    ) -> tuple[StepOutput[jax.Array], jax.Array, Any]:
        model = nnx.merge(model_def, jax.tree_util.tree_unflatten(state_def, weights.leaves))
        attach(model, weights.adapters)
        arrays = unpack(packed, layout)
        ids = arrays["input_ids"]
        arrays["input_ids"] = jnp.where(ids < 0, sampled_before[jnp.maximum(future_token(ids), 0)], ids)
        names = ("temperature", "top_p", "min_p", "top_k", "seed", "index", "forced")
        rows = [arrays.pop(name) for name in names]
        guides = {name: arrays.pop(name) for name in ("bias_ids", "bias", "mask") if name in arrays}
        by_token = NamedSharding(mesh, P("data"))
        arrays = {name: jax.sharding.reshard(array, by_token) for name, array in arrays.items()}
        forward_batch, metadata = batch_of(arrays, layout, attention, places)
        output, pool, _, experts = model(forward_batch, memory_pools, metadata)
        logits = jax.sharding.reshard(output.next_token_logits, NamedSharding(mesh, P()))
        tokens, logprobs = sample(logits, *rows, guided_BV=guided(logits, **guides) if guides else None)
        if experts is not None:
            everywhere = NamedSharding(mesh, P())
            experts = jnp.stack([jax.sharding.reshard(one, everywhere) for one in experts], axis=1).astype(jnp.uint16)
        top = most_likely(logits, rows[0], layout.n_top) if layout.n_top else (None, None)
        n = min(len(tokens), len(sampled_before))
        return StepOutput(tokens, logprobs, experts, *top), sampled_before.at[:n].set(tokens[:n]), pool

    return step
