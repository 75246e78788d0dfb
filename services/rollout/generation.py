"""Running requests for HTTP: drain, client disconnects, and answers in SGLang's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from services.rollout import metrics
from services.rollout.engine.protocol import Engine, FinishReason, GenerateRequest, GenerateResult
from shared.errors import Unavailable

type Receive = Callable[[], Awaitable[Any]]


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass
class Generation:
    """Everything that runs requests goes through here.

    After `drain` begins new requests are refused; running ones may end within half of the grace and are then ended with
    what they have.
    """

    engine: Engine
    grace_s: float
    draining: bool = field(default=False, init=False)

    async def run(self, request: GenerateRequest, receive: Receive | None = None) -> GenerateResult:
        """Runs one request; `receive` is the ASGI channel that tells when the client goes away.

        Raises Unavailable while draining, ClientGone (the engine has then been told to stop), and what `Engine.generate` raises.
        """
        if self.draining:
            raise Unavailable("the server is stopping", "send the request to another server")
        if receive is None:
            result = await self.engine.generate(request)
        else:
            result = await self._watched(request, receive)
        metrics.count(result)
        return result

    async def _watched(self, request: GenerateRequest, receive: Receive) -> GenerateResult:
        """Cancels the generation when the client disconnects: the engine would go on for nobody."""
        generating = asyncio.ensure_future(self.engine.generate(request))
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
            await asyncio.sleep(self.grace_s / 2)
            await self.engine.abort(None)
            raise


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def answer(result: GenerateResult, *, arrays: bool) -> dict[str, Any]:
    """SGLang's answer to /generate. Log-probabilities are a float32 array with `arrays`, else SGLang's [logprob, id, text] rows."""
    ids, logprobs = result.output_ids, result.logprobs
    rows = logprobs if arrays else [[p, t, None] for p, t in zip(logprobs.tolist(), ids.tolist(), strict=True)]
    return {
        "output_ids": ids if arrays else ids.tolist(),
        "meta_info": {
            "id": result.rid,
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": result.cached_tokens,
            "output_token_logprobs": rows,
            "finish_reason": finish(result.finish),
            "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in result.versions],
            "weight_version": result.versions[-1].version if result.versions else None,
        },
    }


def finish(reason: FinishReason) -> dict[str, Any]:
    fields = {"matched": reason.matched, "length": reason.length, "message": reason.message}
    return {"type": reason.type, **{k: v for k, v in fields.items() if v is not None}}
