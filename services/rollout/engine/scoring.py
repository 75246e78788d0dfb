"""Log-probabilities of a given text, under the serving weights or others: are they what the trainer meant?

Runs as one prefill of an already compiled shape: position i is asked for the log-probability of token i + 1.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

from services.rollout.engine.scheduler import RolloutScheduler
from services.rollout.engine.step import SamplingRows


def score(scheduler: RolloutScheduler, ids: np.ndarray, leaves: list[jax.Array] | None = None) -> np.ndarray | None:
    """float32[m]: log-probabilities of tokens 1…m of `ids` (int32[n], n >= 2), each given its prefix; call between two steps.

    m is n - 1, or less where the engine's largest batch is; an engine that runs one request at a time cannot tell: None.
    `leaves` are weights to use instead of the serving ones.
    """
    n = min(len(ids), scheduler.max_running_requests, scheduler.model_config.context_len)
    if n < 2:
        return None
    ids, page = np.asarray(ids[:n], np.int32), scheduler.page_size
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
