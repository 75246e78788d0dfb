"""One step of the engine as one compiled call: model, sampling and log-probability together, one transfer back.

The engine's own path makes three calls and several transfers a step, and returns bfloat16 log-probabilities for
bfloat16 models. The weights are an argument of the compiled function, so new weights of the same shapes never
recompile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.logits_processor import LogitsMetadata
from sgl_jax.srt.managers.schedule_batch import ModelWorkerBatch
from sgl_jax.srt.model_executor.forward_batch_info import ForwardBatch

from services.rollout.engines.sglang_jax.scheduling.sampling import sample


class SamplingRows:
    """Sampling parameters of the requests of one batch, one row each, padded with greedy rows."""

    def __init__(self, size: int) -> None:
        self.temperature_B = np.zeros(size, np.float32)
        self.top_p_B = np.ones(size, np.float32)
        self.top_k_B = np.full(size, np.iinfo(np.int32).max, np.int32)
        self.seed_B2 = np.zeros((size, 2), np.uint32)
        self.index_B = np.zeros(size, np.int32)
        self.forced_B = np.full(size, -1, np.int32)

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.temperature_B, self.top_p_B, self.top_k_B, self.seed_B2, self.index_B, self.forced_B


class FusedStep:
    """Runs batches on a model runner; owns the only reference to the serving weights' leaves besides the runner's."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._model_def, _ = nnx.split(runner.model)
        self._compiled = compiled_step(runner.mesh)

    @property
    def compilations(self) -> int:
        """Number of shapes compiled so far."""
        return self._compiled._cache_size()

    def __call__(
        self, batch: ModelWorkerBatch, rows: SamplingRows, leaves: list[jax.Array] | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """int32[B] sampled tokens, float32[B] log-probabilities, and of a model with experts those that the tokens were
        sent to, uint16[T, layers, k]; B and T are the padded numbers of requests and tokens of `batch`.

        `leaves` are weights to use instead of the serving ones.
        """
        runner = self._runner
        with jax.set_mesh(runner.mesh):
            tokens, logprobs, experts, pool = self._compiled(*self.arguments(batch, rows, leaves))
        if runner.tp_size == 1 and isinstance(pool, list):
            pool = [jax.device_put(layer, runner.token_to_kv_pool.kv_sharding) for layer in pool]
        runner.memory_pools.replace_all(pool)
        return jax.device_get((tokens, logprobs, experts))

    def arguments(
        self, batch: ModelWorkerBatch, rows: SamplingRows, leaves: list[jax.Array] | None = None
    ) -> tuple[Any, ...]:
        """Build the arguments of the compiled function."""
        runner = self._runner
        forward_batch = ForwardBatch.init_new(batch, runner)
        runner.attn_backend.forward_metadata = runner.attn_backend.get_forward_metadata(batch)
        return (
            self._model_def,
            runner._model_state_def,
            runner.model_state_leaves if leaves is None else leaves,
            runner.memory_pools,
            forward_batch,
            LogitsMetadata.from_model_worker_batch(batch, runner.mesh),
            rows.arrays(),
        )


def compiled_step(mesh: jax.sharding.Mesh) -> Any:
    """Return the step as a function to compile; it takes `FusedStep.arguments`."""

    @partial(jax.jit, donate_argnames=["memory_pools"], static_argnames=["state_def"])
    def step(
        model_def: Any,
        state_def: Any,
        leaves: list[jax.Array],
        memory_pools: Any,
        forward_batch: Any,
        metadata: Any,
        rows: tuple[Any, ...],
    ) -> tuple[jax.Array, jax.Array, jax.Array | None, Any]:
        model = nnx.merge(model_def, jax.tree_util.tree_unflatten(state_def, leaves))
        output, pool, _, experts = model(forward_batch, memory_pools, metadata)
        logits = jax.sharding.reshard(output.next_token_logits, NamedSharding(mesh, P()))
        tokens, logprobs = sample(logits, *rows)
        if experts is not None:
            everywhere = NamedSharding(mesh, P())
            experts = jnp.stack([jax.sharding.reshard(one, everywhere) for one in experts], axis=1).astype(jnp.uint16)
        return tokens, logprobs, experts, pool

    return step
