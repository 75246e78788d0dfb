"""sglang-jax's scheduler with Volley's loop and step, and weights that change while it runs.

Kept from sglang-jax: admission, batching, chunked prefill, the paged key/value pool, the prefix cache, the models.
Replaced: the event loop (one step at a time; the engine's overlapped loop overwrites a buffer the running step still
reads), the forward-and-sample path, output, abort, pause and flush (the stock ones can lose requests or deadlock).

Invariants: weights change only between two steps; every token is labelled with the version that computed it; in the
modes `retract` and `abort` no token is computed from keys and values of older weights.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx
from sgl_jax.srt.layers.logits_processor import LogitsProcessorOutput
from sgl_jax.srt.managers.io_struct import AbortReq
from sgl_jax.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
from sgl_jax.srt.managers.scheduler import GenerationBatchResult, Scheduler
from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams

from services.rollout.engines.sglang_jax.link import EngineLink, Message
from services.rollout.engines.sglang_jax.scheduling.inputs import SamplingRows
from services.rollout.engines.sglang_jax.scheduling.requests import RolloutReq, dropped
from services.rollout.engines.sglang_jax.scheduling.routing import RoutingPool, routing_of
from services.rollout.engines.sglang_jax.scheduling.step import FusedStep


class RolloutScheduler(Scheduler):
    """Runs steps and answers messages, all on one thread."""

    def __init__(self, server_args: Any, link: EngineLink, version: str | None) -> None:
        self.version = version
        self.paused = False
        self.output_tokens = 0
        self.counts = {"prefill": 0, "decode": 0, "prefill_tokens": 0}
        self._link = link
        self._done: list[Message] = []
        self._new: list[Message] = []
        super().__init__(server_args, communication_backend=self)
        self.step = FusedStep(self.runner)
        routing = routing_of(self.model_config.hf_config)
        self._routing = routing and RoutingPool(self.max_total_num_tokens + self.page_size, routing)
        self._decode_first_n = 1  # a decode between two prefills: new requests gather, and running ones are not starved

    @property
    def runner(self) -> Any:
        return self.tp_worker.model_runner

    def send_pyobj(self, message: Any) -> None:
        """Called by the engine's own code when it drops a request without a result of its own."""
        if isinstance(message, AbortReq):
            self.drop(message.rid)

    def drop(self, rid: str) -> None:
        """End a request that is nowhere, without tokens."""
        self._done.append(dropped(rid))

    # --- the loop ---------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Run at most one step; send new tokens and results. Returns False if nothing is left to do now."""
        self._make_room()
        batch = None if self.paused else self.get_next_batch_to_run()
        self.cur_batch = batch
        if batch is not None:
            self.process_batch_result(batch, self.run_batch(batch))
        elif not self.paused:
            self.on_idle()
        self.last_batch, self.cur_batch = (self.last_batch if self.paused else batch), None
        if self._new:
            self._link.send({"op": "tokens", "new": self._new})
            self._new = []
        if self._done:
            self._link.send({"op": "done", "results": self._done})
            self._done = []
        return not self.paused and (batch is not None or bool(self.waiting_queue))

    def _make_room(self) -> None:
        """Evict more cached prefixes than a step needs, because each eviction walks the whole cache."""
        if self.token_to_kv_pool_allocator.available_size() < 2 * self.max_running_requests:
            self.tree_cache.evict(EvictParams(num_tokens=self.max_total_num_tokens // 16, dp_rank=0))

    def run_batch(self, batch: ScheduleBatch) -> GenerationBatchResult:
        self.forward_ct += 1
        info = batch.reqs_info[0]
        extend = batch.forward_mode.is_extend()
        self.counts["prefill" if extend else "decode"] += 1
        self.counts["prefill_tokens"] += info.extend_num_tokens if extend else 0
        worker_batch = batch.get_model_worker_batch(*self.tp_worker.get_precompile_paddings(), self.page_size)
        rows = SamplingRows(len(worker_batch.seq_lens))
        for i, req in enumerate(info.reqs):
            req.fill_row(rows, i)
        output = self.step(worker_batch, rows)
        if output.experts_TLK is not None:
            self._route(worker_batch, info.reqs, output.experts_TLK)
        if rows.with_top:
            for i, req in enumerate(info.reqs):
                req.keep_top(output, i)
        n = len(info.reqs)
        info.output_ids = output.tokens_B[:n]
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None, next_token_logprobs=output.logprobs_B[:n]),
            next_token_ids=output.tokens_B.tolist(),
            extend_input_len_per_req=None,
            extend_logprob_start_len_per_req=None,
            bid=worker_batch.bid,
            cache_miss_count=0,
        )

    def _route(self, batch: Any, reqs: list[RolloutReq], experts_TLK: np.ndarray) -> None:
        """Store the experts of the step's tokens, while the requests still have their slots."""
        assert self._routing is not None
        self._routing.write(batch, experts_TLK)
        for req, n in zip(reqs, batch.seq_lens, strict=False):
            req.route(self._routing, self.req_to_token_pool.req_to_token[req.req_pool_idx, :n])

    def stream_output(self, reqs: list[RolloutReq], *_: Any, **__: Any) -> None:
        """Label the step's new tokens and collect the ended requests. sglang-jax calls it after every step."""
        version = self.version or ""
        for req in reqs:
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
        req = RolloutReq(message, self.model_config, self.version or "", matcher)
        req.logprob_start_len = len(req.origin_input_ids) - 1
        self._add_request_to_queue(req)

    def live(self) -> list[RolloutReq]:
        """Return every request that has not ended."""
        running = [req for info in self.running_batch.reqs_info for req in info.reqs or []]
        parked = [req for req in self.chunked_reqs if req is not None]
        last = [req for info in self.last_batch.reqs_info for req in info.reqs or []] if self.last_batch else []
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

    def swap(self, leaves: list[jax.Array], version: str, mode: str) -> Message:
        """Make `leaves` serve as `version`; see `CommitMode`. Returns how many requests go on, and how many ended."""
        retracted = [] if mode == "in_place" else self._retract_all()
        aborted = [req for req in retracted if req.output_ids] if mode == "abort" else []
        for req in aborted:
            self.waiting_queue.remove(req)
            self._end_now(req, f"weights updated to {version}")
        self.runner.model_state_leaves = leaves
        nnx.update(self.runner.model, jax.tree_util.tree_unflatten(self.runner._model_state_def, leaves))
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
        self.waiting_queue = [*retracted, *self.waiting_queue, *waiting]
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
