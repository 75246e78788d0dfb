"""Answer an agent's call over HTTP, in the dialect that it was asked in.

An answer leaves only once it is recorded. A streamed one is therefore sent whole, after comments that keep the
connection open while the model samples. If the agent goes away meanwhile, nobody waits for the call any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from services.orchestrator import metrics
from services.orchestrator.sessions.answers import RecordedCall
from services.orchestrator.sessions.failures import CallsUsedUp, ContextExceeded, SessionOver
from services.orchestrator.sessions.records import CallEntry
from services.orchestrator.sessions.session import Session
from shared.dialects.dialect import Dialect
from shared.dialects.events import KEEP_ALIVE, encode_finished
from shared.dialects.records import Asked, Head
from shared.errors import InputError, NotFound, RateLimited, Unauthorized, Unavailable, VolleyError, problem
from shared.models.chat import ChatTokenizer
from shared.process import telemetry
from shared.web.problems import MEDIA_TYPE, problem_response

_QUIET_S = 10.0
"""Time without a byte on a stream that waits, in seconds."""
_EVENTS = "text/event-stream; charset=utf-8"
_log = telemetry.Log("agents")

type Answer = tuple[RecordedCall, CallEntry]
_CODES: tuple[tuple[type[VolleyError], str], ...] = (
    (ContextExceeded, "context_length_exceeded"),
    (CallsUsedUp, "calls_used_up"),
    (SessionOver, "session_over"),
    (Unauthorized, "invalid_api_key"),
    (NotFound, "model_not_found"),
    (RateLimited, "rate_limit_exceeded"),
    (Unavailable, "unavailable"),
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call to answer."""

    session: Session
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
        asking, leaving = asyncio.ensure_future(self._call()), asyncio.ensure_future(_gone(receive))
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
                await send({"type": "http.response.body", "body": stream.fail(problem(error))})
            else:
                await error_response(error, scope["path"])(scope, receive, send)
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


async def _gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response(error: VolleyError, path: str) -> Response:
    """Answer with an error in the shape that the clients of a path read: OpenAI's, or Anthropic's for messages."""
    plain = problem_response(error, path)
    message = f"{error.detail} ({error.hint})" if error.hint else error.detail
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    kind = _kind(error)
    inner: dict[str, Any] = {"type": kind, "message": message}
    if "/messages" in path:
        body = {**problem(error), "type": "error", "error": inner}
    else:
        body = {**problem(error), "error": {**inner, "param": None, "code": code}}
    headers = {name: plain.headers[name] for name in ("retry-after", "www-authenticate") if name in plain.headers}
    return Response(orjson.dumps(body), error.status, headers, MEDIA_TYPE)


def _kind(error: VolleyError) -> str:
    """Name of an error's kind, which both APIs have in common."""
    if isinstance(error, Unauthorized):
        return "authentication_error"
    if isinstance(error, NotFound):
        return "not_found_error"
    if isinstance(error, RateLimited):
        return "rate_limit_error"
    return "invalid_request_error" if isinstance(error, InputError) else "api_error"
