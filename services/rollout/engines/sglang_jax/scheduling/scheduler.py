"""sglang-jax's scheduler with Volley's loop and step, and weights that change while it runs.

Kept from sglang-jax: admission, batching, chunked prefill, the paged key/value pool, the prefix cache, the models.
Replaced: the event loop (the engine's overlapped loop overwrites a buffer the running step still reads), the
forward-and-sample path, output, abort, pause and flush (the stock ones can lose requests or deadlock).

While the device runs a step, the host schedules and launches the next one, then reads the first one's results. What the
host cannot know yet: a request that turns out to have ended runs in the next step once more, and that token is dropped.
Requests that end by their length, or are aborted, are left out. The host waits for the running step (`settle`) before
it does anything else: before messages other than new requests, before it samples with a constraint that depends on the
token, and before requests might be retracted for want of memory.

Invariants: weights change only between two steps, and no step runs meanwhile; every token is labelled with the version
that computed it; in the modes `retract` and `abort` no token is computed from keys and values of older weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from sgl_jax.srt.managers.io_struct import AbortReq
from sgl_jax.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.common import release_kv_cache

from services.rollout.engines.sglang_jax.link import EngineLink, Message
from services.rollout.engines.sglang_jax.scheduling.adapters import EngineWeights
from services.rollout.engines.sglang_jax.scheduling.inputs import SamplingRows
from services.rollout.engines.sglang_jax.scheduling.requests import GuideOf, RolloutReq, dropped, no_guide
from services.rollout.engines.sglang_jax.scheduling.routing import RoutingPool, routing_of
from services.rollout.engines.sglang_jax.scheduling.step import FusedStep, StepOutput, future_token


class Flight(NamedTuple):
    """Step that the device runs.

    batch, inputs: sglang-jax's batch, and the arrays made of it. The batch may have changed since.
    rows: the row of each request that gets a token, by the request's `id`.
    slots: of the tokens of each request, if experts are recorded.
    """

    batch: ScheduleBatch
    inputs: Any
    reqs: list[RolloutReq]
    rows: dict[int, int]
    slots: list[np.ndarray]
    output: StepOutput[jax.Array]


def _own(reqs: Iterable[Any]) -> list[RolloutReq]:
    """List requests of sglang-jax's batches, all made by `RolloutScheduler.add`."""
    return list(reqs)


class RolloutScheduler(Scheduler):
    """Runs steps and answers messages, all on one thread."""

    # Only `add` queues requests.
    waiting_queue: list[RolloutReq]  # pyrefly: ignore[bad-override-mutable-attribute]
    chunked_reqs: list[RolloutReq | None]

    def __init__(self, server_args: Any, link: EngineLink, version: str | None) -> None:
        self.version = version
        self.paused = False
        self.output_tokens = 0
        self.guide_of: GuideOf = no_guide
        self.counts = {"prefill": 0, "decode": 0, "prefill_tokens": 0}
        self._link = link
        self._done: list[Message] = []
        self._new: list[Message] = []
        self._flight: Flight | None = None
        backend: Any = self  # the engine calls `send_pyobj` only
        super().__init__(server_args, communication_backend=backend)
        self.step = FusedStep(self.runner, self.tp_worker.compilation_manager.max_padded_batch_size)
        routing = routing_of(self.model_config.hf_config)
        self._routing = None if routing is None else RoutingPool(self.max_total_num_tokens + self.page_size, routing)
        self._decode_first_n = 1  # a decode between two prefills: new requests gather, and running ones are not starved

    @property
    def runner(self) -> Any:
        return self.tp_worker.model_runner

    def send_pyobj(self, message: Any) -> None:
        """Called by the engine's own code when it drops a request without a result of its own."""
        if isinstance(message, AbortReq):
            assert isinstance(message.rid, str)
            self.drop(message.rid)

    def drop(self, rid: str) -> None:
        """End a request that is in no queue or batch, without tokens."""
        self._done.append(dropped(rid))

    # --- the loop ---------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Launch at most one step and settle the one before. Returns False if nothing is left to do now."""
        self._make_room()
        if self._flight is not None and not self._may_run_ahead(self._flight):
            self.settle()
        batch = None if self.paused else self.get_next_batch_to_run()
        if not self.paused:
            self.last_batch = batch
        launched = None if batch is None else self._launch(batch)
        settled = self.settle(launched)
        if batch is None and not settled and not self.paused:
            self.on_idle()
        return not self.paused and (batch is not None or settled or bool(self.waiting_queue))

    def settle(self, ahead: Flight | None = None) -> bool:
        """Wait for the running step and send its results; `ahead` is the step launched after it, if one is.

        Returns False if no step ran.
        """
        flight, self._flight = self._flight, ahead
        if flight is not None:
            self.cur_batch = flight.batch  # for sglang-jax's watchdog
            self._process(flight, jax.device_get(flight.output), ahead)
            self.cur_batch = None
        if self._new:
            self._link.send({"op": "tokens", "new": self._new})
            self._new = []
        if self._done:
            self._link.send({"op": "done", "results": self._done})
            self._done = []
        return flight is not None

    def _make_room(self) -> None:
        """Evict more cached prefixes than a step needs, because each eviction walks the whole cache."""
        if self.token_to_kv_pool_allocator.available_size() < 2 * self.max_running_requests:
            self.tree_cache.evict(EvictParams(num_tokens=self.max_total_num_tokens // 16, dp_rank=0))

    def _may_run_ahead(self, flight: Flight) -> bool:
        """Return whether the next step can be made without the results of `flight`."""
        free = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        enough = free >= 2 * self.max_running_requests * self.page_size
        return enough and not any(req.guide is not None for req in flight.reqs)

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        """Compute a prompt that waiting requests share once: others wait for that step, then find it in the cache."""
        followers = self._followers()
        queue, self.waiting_queue = self.waiting_queue, [req for req in self.waiting_queue if id(req) not in followers]
        batch = super().get_new_batch_prefill()
        left = {id(req) for req in self.waiting_queue}
        self.waiting_queue = [req for req in queue if id(req) in left or id(req) in followers]
        unfinished = left | {id(req) for req in self.chunked_reqs}
        for req in queue:
            req.may_follow &= id(req) not in followers or followers[id(req)] in unfinished
        return batch

    def _followers(self) -> dict[int, int]:
        """Return the waiting requests with the prompt of one before them, which may be half computed, and that one.

        None if waiting would save no more tokens than the smallest prefill, which it costs.
        """
        first = {req.prompt: id(req) for req in self.chunked_reqs if req is not None}
        followers, lacking = dict[int, int](), dict[int, int]()
        for req in () if self.running_batch.batch_is_full else self.waiting_queue:
            if req.may_follow and (leader := first.setdefault(req.prompt, id(req))) != id(req):
                followers[id(req)] = leader
                if leader not in lacking:
                    cached = self.tree_cache.match_prefix(MatchPrefixParams(req.match_key())).device_indices
                    lacking[leader] = len(req.origin_input_ids) - 1 - len(cached)
        saved = sum(lacking[leader] for leader in followers.values())
        return followers if saved > self.tp_worker.compilation_manager.token_buckets[0] else {}

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        """Leave out requests that end with the running step, then prepare the batch for decoding."""
        reqs, pending = _own(batch.reqs_info[0].reqs), self._pending_rows()
        kept = [i for i, req in enumerate(reqs) if id(req) not in pending or not req.ends_with_next()]
        if len(kept) < len(reqs):
            batch.filter_batch(keep_indices={0: kept})
            batch.reqs_info[0].batch_is_full = False
        return super().update_running_batch(batch)

    def _pending_rows(self) -> dict[int, int]:
        return self._flight.rows if self._flight is not None else {}

    def _launch(self, batch: ScheduleBatch) -> Flight:
        self.forward_ct += 1
        info: Any = batch.reqs_info[0]
        reqs, pending = _own(info.reqs), self._pending_rows()
        extend = batch.forward_mode.is_extend()
        self.counts["prefill" if extend else "decode"] += 1
        self.counts["prefill_tokens"] += info.extend_num_tokens if extend else 0
        inputs = batch.get_model_worker_batch(*self.tp_worker.get_precompile_paddings(), page_size=self.page_size)
        rows = SamplingRows(len(inputs.seq_lens))
        for i, req in enumerate(reqs):
            row = pending.get(id(req))
            req.fill_row(rows, i, unknown=row is not None)
            if not extend:
                inputs.input_ids[i] = req.output_ids[-1] if row is None else future_token(row)
        output = self.step.launch(inputs, rows)
        info.output_ids = np.zeros(len(reqs), np.int32)  # sglang-jax counts them; the ids come from above
        slots = self._slots(reqs, inputs.seq_lens) if output.experts_TLK is not None else []
        if extend:  # in the order of the device, the prompts are computed before anything that reads them
            for req in reqs:
                if req is not self.chunked_reqs[0]:
                    self.tree_cache.cache_unfinished_req(req)
        sampling = {id(req): i for i, req in enumerate(reqs) if req is not self.chunked_reqs[0]}
        return Flight(batch, inputs, reqs, sampling, slots, output)

    def _slots(self, reqs: list[RolloutReq], lengths: np.ndarray) -> list[np.ndarray]:
        table = self.req_to_token_pool.req_to_token
        return [table[req.req_pool_idx, :n].copy() for req, n in zip(reqs, lengths, strict=False)]

    def _process(self, flight: Flight, output: StepOutput[np.ndarray], ahead: Flight | None) -> None:
        """Give the step's results, now on the host, to its requests."""
        if output.experts_TLK is not None:
            assert self._routing is not None
            self._routing.write(flight.inputs, output.experts_TLK)
        tokens, logprobs = output.tokens_B.tolist(), output.logprobs_B.tolist()
        self.token_to_kv_pool_allocator.free_group_begin()
        for i, req in enumerate(flight.reqs):
            if req.finished():  # the step before ended it
                continue
            if self._routing is not None and flight.slots:
                req.route(self._routing, flight.slots[i])
            if id(req) not in flight.rows:  # a part of a prompt
                req.is_chunked -= 1
                continue
            req.keep_top(output, i)
            req.output_ids.append(tokens[i])
            req.output_token_logprobs_val.append(logprobs[i])
            req.check_finished()
            if req.finished():
                self._release(req, ahead is not None and id(req) in ahead.rows)
            self._label(req)
        self.token_to_kv_pool_allocator.free_group_end()

    def _release(self, req: RolloutReq, runs_ahead: bool) -> None:
        """Cache the request's tokens and free the rest; the step ahead has taken a slot for one more."""
        req.kv_committed_len -= runs_ahead
        release_kv_cache(req, self.tree_cache, allow_overallocated=runs_ahead)

    def _label(self, req: RolloutReq) -> None:
        """Label the request's new token, if it has one, and collect the request if it has ended."""
        version = self.version or ""
        self.output_tokens += (n := req.label(version))
        if n and req.streamed:
            self._new.append(req.new(n, version))
        if req.finished() and not req.finished_output:
            self._finish(req)

    def _finish(self, req: RolloutReq) -> None:
        req.finished_output = True
        self._done.append(req.result())

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, message: Message, matcher: Any = None) -> None:
        """Queues a request whose ids and lengths the service has checked; `matcher` is of its grammar."""
        req = RolloutReq(message, self.model_config, self.version or "", matcher, self.guide_of)
        req.logprob_start_len = len(req.origin_input_ids) - 1
        self._add_request_to_queue(req)

    def live(self) -> list[RolloutReq]:
        """Return every request that has not ended. Like everything below it is called after `settle`."""
        running = [req for info in self.running_batch.reqs_info for req in _own(info.reqs or ())]
        parked = [req for req in self.chunked_reqs if req is not None]
        last = [req for info in self.last_batch.reqs_info for req in _own(info.reqs or ())] if self.last_batch else []
        unique = {id(req): req for req in (*running, *parked, *last, *self.waiting_queue)}
        return [req for req in unique.values() if not req.finished()]

    def abort(self, rid: str | None) -> int:
        """End a request, or all, with the tokens sampled so far. Ids are compared whole, not as prefixes.

        Running requests end after one more step.
        """
        if self.paused:
            self._retract_all()
        doomed = [req for req in self.live() if rid is None or req.rid == rid]
        queued = {id(req) for req in self.waiting_queue}
        for req in doomed:
            if id(req) in queued:
                self.waiting_queue.remove(req)
                self._end_now(req, "aborted")
            elif req in self.chunked_reqs:
                self._mark_pending_chunked_aborts(AbortReq(rid=req.rid))
            else:
                req.to_finish = FINISH_ABORT("aborted")
        return len(doomed)

    def _end_now(self, req: RolloutReq, why: str) -> None:
        req.finished_reason = FINISH_ABORT(why)
        self._finish(req)

    # --- weights and cache ------------------------------------------------------------------------------------------

    def swap(self, weights: EngineWeights, version: str, mode: str) -> Message:
        """Make `weights` serve as `version`; see `CommitMode`. Returns how many requests go on, and how many ended."""
        retracted = [] if mode == "in_place" else self._retract_all()
        aborted = [req for req in retracted if req.output_ids] if mode == "abort" else []
        for req in aborted:
            self.waiting_queue.remove(req)
            self._end_now(req, f"weights updated to {version}")
        self.runner.model_state_leaves, self.step.adapters = weights.leaves, weights.adapters
        nnx.update(self.runner.model, jax.tree_util.tree_unflatten(self.runner._model_state_def, weights.leaves))
        self.version = version
        for req in self.waiting_queue:
            req.extra_key = version
        return {"continued": len(self.live()), "aborted": len(aborted)}

    def flush(self) -> None:
        """Drop all keys and values; running requests are queued again with their tokens."""
        self._retract_all()

    def _retract_all(self) -> list[RolloutReq]:
        """Move all running requests to the front of the queue, in order, and empty the pool and the prefix cache."""
        self._settle_last_batch()
        waiting, self.waiting_queue = self.waiting_queue, []
        retracted = self.running_batch.retract_all(self.server_args) if not self.running_batch.is_empty() else []
        self._retract_parked_chunked_reqs(retracted)
        self.waiting_queue = [*_own(retracted), *self.waiting_queue, *waiting]
        for info in self.running_batch.reqs_info:
            info.batch_is_full = False
        self.tree_cache.reset()
        self.req_to_token_pool.clear()
        self.token_to_kv_pool_allocator.clear()
        return [req for req in self.waiting_queue if not req.finished()]

    def _settle_last_batch(self) -> None:
        """Merge a prefill that just ran into the running batch, which sglang-jax does only on its next turn."""
        last = self.last_batch
        if last is not None and last.forward_mode.is_extend():
            excluded = self._prepare_chunked_reqs_to_exclude()
            self._process_pending_chunked_aborts()
            last.filter_batch(chunked_req_to_exclude=excluded)
            if not last.is_empty():
                if self.running_batch.is_empty():
                    self.running_batch = last
                else:
                    self.running_batch.merge_batch(last)
        self.last_batch = None
        self.running_batch.filter_batch()
