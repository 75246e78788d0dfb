"""JSON schemas of answers, for the OpenAPI page of the rollout server."""

from __future__ import annotations

from typing import Any

type Schema = dict[str, Any]


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


_COUNT: Schema = {"type": "integer", "minimum": 0}
MODELS = _object({"object": {"const": "list"}, "data": {"type": "array", "items": {"type": "object"}}})
SERVED_MODEL = _object({"id": {"type": "string"}, "object": {"const": "model"}})
RESPONSE = _object({"id": {"type": "string"}, "object": {"const": "response"}, "output": {"type": "array"}})
MESSAGE = _object({"id": {"type": "string"}, "type": {"const": "message"}, "content": {"type": "array"}})
COUNT = _object({"input_tokens": _COUNT})
ANSWER = _object(
    {
        "id": {"type": "string"},
        "object": {"enum": ["text_completion", "chat.completion"]},
        "created": _COUNT,
        "model": {"type": "string"},
        "choices": {
            "type": "array",
            "items": _object({"index": _COUNT, "finish_reason": {"type": "string"}}),
            "minItems": 1,
        },
        "usage": _object({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT}),
    }
)
