"""Log-probabilities of a given text under weights that do not serve yet: is what was loaded what the trainer meant?

Runs as one prefill of an already compiled shape: position i is asked for the log-probability of token i + 1.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

from services.rollout.engine.scheduler import RolloutScheduler
from services.rollout.engine.step import SamplingRows
from shared.errors import WeightsError

# How far the engine may be from the trainer's own log-probabilities, as mean |difference|, by dtype of the engine.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


def check_probe(scheduler: RolloutScheduler, leaves: list[jax.Array], ids: np.ndarray, expected: np.ndarray) -> float:
    """Mean |log p - expected| over the probe's tokens 1…; call between two steps.

    Args:
        ids: int32[n], n >= 2; expected: float32[n-1]. Longer than the engine's largest batch, only the first tokens count.

    Raises:
        WeightsError: the difference is beyond the tolerance, or not finite.
    """
    n = min(len(ids), scheduler.max_running_requests, scheduler.model_config.context_len)
    logprobs = _score(scheduler, leaves, np.asarray(ids[:n], np.int32))
    difference = float(np.abs(logprobs - expected[: n - 1]).mean())
    limit = TOLERANCE[str(jax.numpy.dtype(scheduler.model_config.dtype))]
    if not difference <= limit:
        raise WeightsError(
            f"the weights' fingerprint differs: mean |Δ log p| {difference:.3g} on the probe, at most {limit:g} allowed",
            "trainer and engine disagree about the model or the checkpoint is damaged",
        )
    return difference


def _score(scheduler: RolloutScheduler, leaves: list[jax.Array], ids: np.ndarray) -> np.ndarray:
    n, page = len(ids), scheduler.page_size
    allocator = scheduler.token_to_kv_pool_allocator
    slots = allocator.alloc(-(-n // page) * page)
    if slots is None:
        scheduler.flush()
        slots = allocator.alloc(-(-n // page) * page)
    try:
        batch, rows = _batch(scheduler, ids, np.asarray(slots)[:n])
        _, logprobs = scheduler.step(batch, rows, leaves)
    finally:
        allocator.free(np.asarray(slots))
    return logprobs[: n - 1]


def _batch(scheduler: RolloutScheduler, ids: np.ndarray, slots: np.ndarray) -> tuple[Any, SamplingRows]:
    manager, n = scheduler.tp_worker.compilation_manager, len(ids)
    size = manager.max_padded_batch_size
    tokens = next(bucket for bucket in manager.token_buckets if bucket >= n)
    batch = manager._make_dummy_batch(size, tokens, ForwardMode.EXTEND, manager.cache_loc_buckets[-1], dp_size=1, per_dp_bs_size=size)
    rows = SamplingRows(size)
    rows.forced_B[: n - 1] = ids[1:]
    for name in ("input_ids", "positions", "cache_loc", "seq_lens", "extend_seq_lens", "logits_indices"):
        setattr(batch, name, np.zeros(len(getattr(batch, name)), np.int32))
    batch.out_cache_loc = np.full(tokens, -1, np.int32)
    batch.input_ids[:n], batch.positions[:n] = ids, np.arange(n)
    batch.cache_loc[:n] = batch.out_cache_loc[:n] = slots
    batch.seq_lens[0] = batch.extend_seq_lens[0] = n
    batch.logits_indices[:n] = np.arange(n)
    batch.real_bs, batch.real_input_ids_len = 1, n
    return batch, rows
