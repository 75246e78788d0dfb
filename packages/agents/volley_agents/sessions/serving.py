"""Answer an agent's call over HTTP, in the dialect that it was asked in.

An answer leaves only once it is recorded. A streamed one is therefore sent whole, after comments that keep the
connection open while the model samples. If the agent disconnects meanwhile, the call is abandoned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from shared.errors import InputError, VolleyError
from shared.models.chat import ChatTokenizer
from shared.process import telemetry
from shared.web.problems import problem_response
from volley_agents.sessions import metrics
from volley_agents.sessions.answers import RecordedCall
from volley_agents.sessions.records import CallEntry
from volley_agents.sessions.session import AgentSession
from volley_serving.dialects.dialect import Dialect
from volley_serving.dialects.events import KEEP_ALIVE, encode_finished
from volley_serving.dialects.records import Asked, Head

_QUIET_S = 10.0
"""Time without a byte on a stream that waits, in seconds."""
_EVENTS = "text/event-stream; charset=utf-8"
_log = telemetry.Log("agents")

type Answer = tuple[RecordedCall, CallEntry]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call to answer."""

    session: AgentSession
    dialect: Dialect[Any]
    asked: Asked
    tokenizer: ChatTokenizer

    @property
    def headers(self) -> dict[str, str]:
        """Headers that name the sampling of the answer, which is the run's."""
        return {"x-volley-sampling": "; ".join(f"{name}={value}" for name, value in self.session.sampling.items())}

    def body(self, recorded: RecordedCall) -> bytes:
        """Write the whole answer, as JSON or as a stream; the same each time."""
        dialect, asked, tokenizer = self.dialect, self.asked, self.tokenizer
        if asked.stream:
            return encode_finished(dialect.stream(asked, recorded.head, tokenizer), recorded.answers, recorded.usage)
        return orjson.dumps(
            dialect.write(asked, recorded.head, recorded.answers, recorded.usage, tokenizer),
            option=orjson.OPT_SERIALIZE_NUMPY,
        )


class CallResponse(Response):
    """Response that waits for the answer itself. Args: call: answers it."""

    def __init__(self, exchange: Exchange, call: Callable[[], Coroutine[Any, Any, Answer]]) -> None:
        super().__init__()
        self._exchange, self._call = exchange, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asking, leaving = asyncio.ensure_future(self._call()), asyncio.ensure_future(_disconnected(receive))
        started = False
        try:
            while not asking.done():
                quiet_s = _QUIET_S if self._exchange.asked.stream else None
                await asyncio.wait({asking, leaving}, timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    metrics.SESSION_CALLS.labels("left").inc()
                    return
                if not asking.done():
                    if not started:
                        await send(_start(200, _EVENTS, self._exchange.headers))
                        started = True
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            await self._finish(asking.result(), send, started=started)
            if not leaving.done():
                self._exchange.session.delivered(asking.result()[1])
        except VolleyError as error:
            metrics.SESSION_CALLS.labels("refused" if isinstance(error, InputError) else "failed").inc()
            if started:
                stream = self._exchange.dialect.stream(self._exchange.asked, Head(""), self._exchange.tokenizer)
                await send({"type": "http.response.body", "body": stream.fail(error)})
            else:
                await problem_response(error, scope["path"])(scope, receive, send)
        finally:
            for task in (asking, leaving):
                task.cancel()
            await asyncio.wait({asking, leaving})

    async def _finish(self, answer: Answer, send: Send, *, started: bool) -> None:
        recorded, _ = answer
        body = self._exchange.body(recorded)
        if not started:
            media_type = _EVENTS if self._exchange.asked.stream else "application/json"
            headers = {
                **self._exchange.headers,
                "x-volley-call": str(recorded.number),
                "content-length": str(len(body)),
            }
            await send(_start(200, media_type, headers))
        await send({"type": "http.response.body", "body": body})


def _start(status: int, media_type: str, headers: Mapping[str, str]) -> dict[str, Any]:
    named = {"content-type": media_type, "cache-control": "no-store", **headers}
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(name.encode(), text.encode()) for name, text in named.items()],
    }


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
