"""Running requests for HTTP: admission, drain, client disconnects, and answers in SGLang's shape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.rollout import metrics
from services.rollout.engines.base import Engine, FinishReason, GenerateRequest, GenerateResult
from services.rollout.weights.updater import WeightUpdater
from shared.errors import InputError, RateLimited, Unavailable

CROWD = 16
"""So many times the requests that run at once may be in the service; those that do not run wait in the engine's queue.
"""
SILENT_S = 5.0
_ABORT_S = 1.0
_FULL_RETRY_S = 2.0

type Receive = Callable[[], Awaitable[Any]]


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass
class GenerationRunner:
    """Everything that runs requests goes through here.

    Args:
        updates: tells whether what the engine serves can be used. Asked before a request is run, and again before its
            answer leaves: what was sampled meanwhile by weights that turned out wrong is nobody's data, also when right
            ones serve by then.

    After `drain` begins new requests are refused; running ones may end within half of the grace and are then ended with
    what they have.
    """

    engine: Engine
    grace_s: float
    updates: WeightUpdater
    draining: bool = field(default=False, init=False)
    n_requests: int = field(default=0, init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def why_not(self) -> Unavailable | None:
        """What keeps requests from being routed here, or None."""
        if self.draining:
            return Unavailable("the server is stopping")
        if self.engine.silent_s >= SILENT_S:
            return Unavailable(f"the engine has been silent for {self.engine.silent_s:g} s")
        return self.updates.why_not_ready()

    async def run(self, requests: Sequence[GenerateRequest], receive: Receive | None = None) -> list[GenerateResult]:
        """Runs requests side by side; `receive` is the ASGI channel that tells when the client goes away.

        Raises Unavailable while requests must not be routed here or too many are here already, ClientGone (the engine
        has then been told to stop), and what `Engine.generate` raises.
        """
        self._admit(len(requests))
        beginnings = self.updates.state.beginnings
        self.n_requests += len(requests)
        try:
            results = await (self._all(requests) if receive is None else self._watched(requests, receive))
        finally:
            self.n_requests -= len(requests)
            self._ended.set()
        if (wrong := self.updates.why_not_ready()) is not None:
            raise wrong
        if self.updates.state.beginnings != beginnings:
            raise Unavailable("weights that served meanwhile are not to be trusted", "send the request again")
        for result in results:
            metrics.count(result)
        return results

    def _admit(self, n: int) -> None:
        if (error := self.why_not()) is not None:
            raise type(error)(error.detail, "send the request to another server")
        limit = CROWD * self.engine.info.max_running_requests
        if n > limit:
            raise InputError(f"{n} samples of one prompt are more than the {limit} requests this server takes at once")
        if self.n_requests + n > limit:
            raise RateLimited(
                f"{self.n_requests} requests run or wait here, at most {limit} may", retry_after_s=_FULL_RETRY_S
            )

    async def _all(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """If one fails, the others are aborted."""
        if len(requests) == 1:
            return [await self.engine.generate(requests[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.engine.generate(request)) for request in requests]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _watched(self, requests: Sequence[GenerateRequest], receive: Receive) -> list[GenerateResult]:
        """Cancels the generation when the client disconnects: the engine would go on for nobody."""
        generating = asyncio.ensure_future(self._all(requests))
        listening = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({generating, listening}, return_when=asyncio.FIRST_COMPLETED)
            if not generating.done():
                raise ClientGone
            return generating.result()
        finally:
            generating.cancel()
            listening.cancel()
            await asyncio.gather(generating, listening, return_exceptions=True)

    async def drain(self) -> None:
        """Worker: waits for the service to stop, then sees running requests off."""
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


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def answer(result: GenerateResult, *, arrays: bool, with_logprobs: bool = True) -> dict[str, Any]:
    """SGLang's answer to /generate. Log-probabilities are a float32 array with `arrays`, else SGLang's [logprob, id,
    text] rows.
    """
    ids = result.output_ids
    return {
        "output_ids": ids if arrays else ids.tolist(),
        "meta_info": {
            "id": result.rid,
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": result.cached_tokens,
            **({"output_token_logprobs": _rows(result, arrays)} if with_logprobs else {}),
            "finish_reason": finish(result.finish),
            "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in result.versions],
            "weight_version": result.versions[-1].version if result.versions else None,
        },
    }


def _rows(result: GenerateResult, arrays: bool) -> Any:
    if arrays:
        return result.logprobs
    return [[p, t, None] for p, t in zip(result.logprobs.tolist(), result.output_ids.tolist(), strict=True)]


def finish(reason: FinishReason) -> dict[str, Any]:
    fields = {"matched": reason.matched, "length": reason.length, "message": reason.message}
    return {"type": reason.type, **{k: v for k, v in fields.items() if v is not None}}
