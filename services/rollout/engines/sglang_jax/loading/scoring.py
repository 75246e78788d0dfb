"""Log-probabilities of given tokens under the serving weights or others.

The tokens are scored by prefills of one compiled shape, part by part: position i gives the log-probability of token
i + 1. A batch scores as many positions as requests may run, and at least those of a probe, which thus takes one pass
over the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

from services.rollout.engines.sglang_jax.link import Message
from services.rollout.engines.sglang_jax.scheduling.adapters import EngineWeights
from services.rollout.engines.sglang_jax.scheduling.inputs import SamplingRows
from services.rollout.engines.sglang_jax.scheduling.scheduler import RolloutScheduler
from services.rollout.engines.sglang_jax.scheduling.step import StepOutput

_PASSES = 8
_PROBE_ROWS = 64


def score(
    scheduler: RolloutScheduler, ids: np.ndarray, weights: EngineWeights | None = None, *, passes: int = _PASSES
) -> np.ndarray | None:
    """float32[m]: log-probabilities of tokens 1…m of `ids` (int32[n], n >= 2), each given its prefix; call between two
    steps.

    m is n - 1, or less where the engine's context or `passes` of its largest batch end; None if that is none.
    `weights` are used instead of the serving ones.
    """
    found = [output.logprobs_B[:n] for output, n in _outputs(scheduler, ids, weights, passes)]
    return np.concatenate(found) if found else None


def score_with_top(scheduler: RolloutScheduler, ids: np.ndarray, n_top: int) -> Message | None:
    """Like `score` for all of `ids`, with the `n_top` most likely tokens at each position, as the link carries them."""
    logprobs, top_ids, top_logprobs = [], [], []
    for output, n in _outputs(scheduler, ids, None, len(ids), with_top=n_top > 0):
        logprobs.append(output.logprobs_B[:n])
        if output.top_ids_BN is not None and output.top_logprobs_BN is not None:
            top_ids.append(output.top_ids_BN[:n, :n_top].ravel())
            top_logprobs.append(output.top_logprobs_BN[:n, :n_top].ravel())
    if not logprobs:
        return None
    top = {"top_ids": np.concatenate(top_ids), "top_logprobs": np.concatenate(top_logprobs)} if top_ids else {}
    return top | {"logprobs": np.concatenate(logprobs)}


def _outputs(
    scheduler: RolloutScheduler, ids: np.ndarray, weights: EngineWeights | None, passes: int, *, with_top: bool = False
) -> Iterator[tuple[StepOutput, int]]:
    """Yield the outputs of the prefills in turn, each with the number of positions it scores."""
    page, rows = scheduler.page_size, _rows(scheduler)
    rows = rows // page * page or rows
    n = min(len(ids) - 1, passes * rows, scheduler.model_config.context_len, scheduler.max_total_num_tokens)
    if n < 1:
        return
    ids = np.asarray(ids, np.int32)
    allocator = scheduler.token_to_kv_pool_allocator
    slots = allocator.alloc(-(-n // page) * page)
    if slots is None:
        scheduler.flush()
        slots = allocator.alloc(-(-n // page) * page)
    try:
        for start in range(0, n, rows):
            end = min(start + rows, n)
            batch, sampling = _batch(scheduler, ids[start : end + 1], start, np.asarray(slots)[:end])
            sampling.with_top = with_top
            yield scheduler.step(batch, sampling, weights), end - start
    finally:
        allocator.free(np.asarray(slots))


def _rows(scheduler: RolloutScheduler) -> int:
    """Positions that a batch answers for: no more than a prefill has tokens, and places for them."""
    manager = scheduler.tp_worker.compilation_manager
    most = min(_PROBE_ROWS, manager.token_buckets[-1], manager.cache_loc_buckets[-1])
    return max(scheduler.max_running_requests, most)


def _batch(scheduler: RolloutScheduler, ids: np.ndarray, start: int, slots: np.ndarray) -> tuple[Any, SamplingRows]:
    """One request that has `start` tokens in the pool and adds all of `ids` but the last; `slots` are of old and new
    tokens.
    """
    manager, n = scheduler.tp_worker.compilation_manager, len(ids) - 1
    size = max(manager.max_padded_batch_size, _rows(scheduler))
    tokens = next(bucket for bucket in manager.token_buckets if bucket >= max(n, size))
    batch = manager._make_dummy_batch(
        size, tokens, ForwardMode.EXTEND, manager.cache_loc_buckets[-1], dp_size=1, per_dp_bs_size=size
    )
    rows = SamplingRows(size)
    rows.forced_B[:n] = ids[1:]
    for name in (
        "input_ids",
        "positions",
        "cache_loc",
        "seq_lens",
        "extend_seq_lens",
        "extend_prefix_lens",
        "logits_indices",
    ):
        setattr(batch, name, np.zeros(len(getattr(batch, name)), np.int32))
    batch.out_cache_loc = np.full(tokens, -1, np.int32)
    batch.input_ids[:n], batch.positions[:n] = ids[:-1], start + np.arange(n)
    batch.cache_loc[: len(slots)], batch.out_cache_loc[:n] = slots, slots[start:]
    batch.seq_lens[0], batch.extend_seq_lens[0], batch.extend_prefix_lens[0] = len(slots), n, start
    batch.logits_indices[:n] = np.arange(n)
    batch.real_bs, batch.real_input_ids_len = 1, n
    return batch, rows
