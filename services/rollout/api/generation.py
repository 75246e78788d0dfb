"""Run requests of HTTP clients: admission, drain, disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.rollout import metrics
from services.rollout.api import validation
from services.rollout.engines.base import (
    Engine,
    GenerateRequest,
    GenerateResult,
    NewTokens,
    ScoredTokens,
)
from services.rollout.weights.updater import WeightUpdater
from shared.errors import NotReady, RateLimited, Unavailable
from shared.process import tracing

SILENT_S = 5.0
_ABORT_S = 1.0
_FULL_RETRY_S = 2.0

type Receive = Callable[[], Awaitable[Any]]
type Watch = Callable[[int, NewTokens], bool]


class ClientGone(Exception):
    """The client has disconnected."""


@dataclass
class GenerationRunner:
    """Runs all requests to the engine.

    Args:
        updates: knows whether the serving weights can be used. It is asked before a request runs, and again before its
        answer is sent: tokens of wrong weights are never returned, even if correct ones serve by then.

    Once `drain` has started, new requests are refused. Running ones get half of the grace period to finish; then they
    end with the tokens they have.
    """

    engine: Engine
    grace_s: float
    updates: WeightUpdater
    draining: bool = field(default=False, init=False)
    n_requests: int = field(default=0, init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _scoring: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def why_not(self) -> Unavailable | None:
        """Return why no requests may be routed here; None if they may be."""
        if self.draining:
            return NotReady("the server is stopping")
        if self.engine.silent_s >= SILENT_S:
            return NotReady(f"the engine has been silent for {self.engine.silent_s:g} s")
        return self.updates.why_not_ready()

    async def run(
        self, requests: Sequence[GenerateRequest], receive: Receive | None = None, watch: Watch | None = None
    ) -> list[GenerateResult]:
        """Run requests concurrently; `receive` is the ASGI channel that reports the client's disconnect.

        `watch` receives the index of a request and its new tokens as they are sampled; true ends that request.

        Raises Unavailable while requests must not be routed here or too many are here already, ClientGone (the engine
        has then been told to stop), and as `Engine.generate`.
        """
        started_at = time.time()
        results = await self._run_if_ready(len(requests), lambda: _for_client(self._all(requests, watch), receive))
        for result in results:
            metrics.count(result)
            _trace(result, started_at)
        return results

    async def score(self, ids: np.ndarray, receive: Receive | None = None, top_logprobs: int = 0) -> ScoredTokens:
        """Return the log-probabilities of given tokens, int32[n] with n >= 2. Raises as `run`.

        `top_logprobs`: how many of the most likely tokens to return at each position.

        One text is scored at a time, because the engine samples nothing meanwhile; texts of disconnected clients are
        skipped.
        """
        return await self._run_if_ready(1, lambda: _for_client(self._scored(ids, top_logprobs), receive))

    async def _scored(self, ids: np.ndarray, top_logprobs: int) -> ScoredTokens:
        async with self._scoring:
            return await self.engine.score(ids, top_logprobs)

    async def _run_if_ready[T](self, n: int, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of n requests if the weights can still be used. Raises Unavailable if not."""
        self._admit(n)
        n_resets = self.updates.state.n_resets
        self.n_requests += n
        try:
            found = await work()
        finally:
            self.n_requests -= n
            self._ended.set()
        if (wrong := self.updates.why_not_ready()) is not None:
            raise wrong
        if self.updates.state.n_resets != n_resets:
            raise NotReady("the weights changed unexpectedly while this request ran", "send the request again")
        return found

    def _admit(self, n: int) -> None:
        if (error := self.why_not()) is not None:
            raise type(error)(error.detail, "send the request to another server")
        limit = validation.max_requests(self.engine.info)
        validation.check_count(n, self.engine.info)
        if self.n_requests + n > limit:
            raise RateLimited(
                f"{self.n_requests} requests run or wait here, at most {limit} may", retry_after_s=_FULL_RETRY_S
            )

    async def _all(self, requests: Sequence[GenerateRequest], watch: Watch | None) -> list[GenerateResult]:
        """Run all requests; if one fails, abort the others."""
        if len(requests) == 1:
            return [await self._one(0, requests[0], watch)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(i, request, watch)) for i, request in enumerate(requests)]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, i: int, request: GenerateRequest, watch: Watch | None) -> GenerateResult:
        if watch is None:
            return await self.engine.generate(request)
        enough = asyncio.Event()

        def on_tokens(new: NewTokens) -> None:
            if watch(i, new):
                enough.set()

        ending = asyncio.ensure_future(self._end_when(enough, request.rid))
        try:
            return await self.engine.generate(request, on_tokens)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _end_when(self, enough: asyncio.Event, rid: str) -> None:
        await enough.wait()
        await self.engine.abort(rid)

    async def drain(self) -> None:
        """Worker that waits for the service to stop, then for running requests to end."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.draining = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.grace_s / 2):
                    while self.n_requests:
                        self._ended.clear()
                        await self._ended.wait()
            with contextlib.suppress(TimeoutError):  # an engine that hangs is killed when it is closed
                async with asyncio.timeout(_ABORT_S):
                    await self.engine.abort(None)
            raise


async def _for_client[T](work: Coroutine[Any, Any, T], receive: Receive | None) -> T:
    """Return the result of `work`; cancel it when the client disconnects. Raises ClientGone."""
    if receive is None:
        return await work
    working, listening = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _trace(result: GenerateResult, started_at: float) -> None:
    """Record the phases of a request below the present span; `started_at` is a time as time.time() gives."""
    place = tracing.here()
    for phase, seconds in zip(("queue wait", "prefill"), result.waited_s, strict=False):
        tracing.record(phase, place, started_at, started_at + seconds)
        started_at += seconds
    about = {
        "gen_ai.usage.input_tokens": result.prompt_tokens,
        "gen_ai.usage.output_tokens": len(result.output_ids),
        "volley.cached_tokens": result.cached_tokens,
    }
    tracing.record("decode" if result.waited_s else "generate", place, started_at, attributes=about)
