"""A model that gives prepared answers over HTTP, so that an agent can be tried without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from pydantic import ValidationError

from services.env.episode_types import Message
from shared.errors import VolleyError
from volley_serving.dialects import dialect
from volley_serving.dialects.dialect import Dialect
from volley_serving.dialects.events import encode_finished
from volley_serving.dialects.reading import new_id
from volley_serving.dialects.records import Answered, Asked, Call, Head, Sampled, Usage

_KNOWS_NOTHING = "I do not know."
_SAMPLED = Sampled(np.zeros(0, np.int32), np.zeros(0, np.float32))
_USAGE = Usage(0, 0)


_NO_TOKENS: Any = None
"""In place of a tokenizer: there are no tokens whose texts could be asked for."""
_DIALECTS: Mapping[str, Dialect[Any]] = {
    "/v1/chat/completions": dialect.CHAT,
    "/v1/responses": dialect.RESPONSES,
    "/v1/messages": dialect.MESSAGES,
}


class ScriptedModel:
    """Gives the assistant messages of `script` in turn, and then its last text again.

    A repeated `Idempotency-Key` gets the same answer, as in a run.
    """

    def __init__(self, script: Sequence[Message] = ()) -> None:
        self._script = [message for message in script if message["role"] == "assistant"]
        self.n_requests = 0
        self._answered: dict[str, bytes] = {}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of the program."""
        known = _DIALECTS.get(request.path)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        if known is None or request.method != "POST":
            return _refusal(404, f"{request.method} {request.path} is not a route of the scripted model")
        try:
            asked = known.read(known.body.model_validate_json(await request.read()))
        except ValidationError as error:
            return _refusal(422, str(error.errors(include_url=False, include_input=False)[0]))
        except VolleyError as error:
            return _refusal(error.status, error.detail)
        key = request.headers.get("Idempotency-Key", "")
        if (body := self._answered.get(key)) is None:
            self.n_requests += 1
            body = _encoded(known, asked, [self._next(asked)] * asked.n)
            if key:
                self._answered[key] = body
        return web.Response(body=body, content_type="text/event-stream" if asked.stream else "application/json")

    def _next(self, asked: Asked) -> Answered:
        if self._script:
            n = min(self.n_requests, len(self._script)) - 1
            return _answered(self._script[n], with_calls=self.n_requests <= len(self._script))
        if asked.reads_calls and asked.messages[-1]["role"] != "tool":
            tool = asked.tools[0].get("function", {})
            arguments = orjson.dumps(_example(tool.get("parameters") or {})).decode()
            call = Call(new_id(), str(tool.get("name")), arguments)
            return Answered(_SAMPLED, "", calls=(call,), finish_reason="tool_calls")
        return Answered(_SAMPLED, _KNOWS_NOTHING)


def _encoded(known: Dialect[Any], asked: Asked, answers: Sequence[Answered]) -> bytes:
    head = Head(asked.model or "scripted")
    if asked.stream:
        return encode_finished(known.stream(asked, head, _NO_TOKENS), answers, _USAGE)
    return orjson.dumps(known.write(asked, head, answers, _USAGE, _NO_TOKENS))


def _answered(message: Message, *, with_calls: bool) -> Answered:
    calls = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    made = tuple(Call(new_id(), str(call.get("name")), _as_text(call.get("arguments"))) for call in calls)
    if not made or not with_calls:
        return Answered(_SAMPLED, message["content"])
    return Answered(_SAMPLED, message["content"], calls=made, finish_reason="tool_calls")


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()


_EXAMPLES: Mapping[str, Any] = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "null": None}


def _example(schema: Mapping[str, Any]) -> Any:
    """A value that a simple schema allows."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "object":
        required = schema.get("required") or ()
        return {name: _example(part) for name, part in (schema.get("properties") or {}).items() if name in required}
    return _EXAMPLES.get(kind, "1") if isinstance(kind, str) else "1"


def _refusal(status: int, message: str) -> web.StreamResponse:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
