"""OpenAPI declarations for bodies that routes read and write by hand; nothing here runs on a request.

Bodies are JSON or msgpack, with one schema. Schemas are plain JSON schemas, or pydantic models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from shared import codec

type Schema = Mapping[str, Any] | type[BaseModel]

PROBLEM: Mapping[str, Any] = {
    "type": "object",
    "description": "RFC 9457",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "hint": {"type": "string"},
        "retry_after_s": {"type": "number"},
        "error": {
            "type": "object",
            "description": "The same for OpenAI clients, if the path starts with /v1/",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": "null"},
                "code": {"type": ["string", "null"]},
            },
        },
    },
    "required": ["type", "title", "status", "detail"],
}

PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"description": text, "content": {"application/problem+json": {"schema": PROBLEM}}}
    for code, text in (
        ("4XX", "The request is wrong, or not allowed now"),
        ("5XX", "The service, or one it needs, failed or is unavailable"),
    )
}
"""Answers that every route may give beside its own."""


def declares(
    *,
    body: Schema | None = None,
    answer: Schema | None = None,
    statuses: tuple[int, ...] = (200,),
    query: type[BaseModel] | None = None,
) -> dict[str, Any]:
    """Return a route's `openapi_extra`: request body, answer with any of `statuses`, and query parameters."""
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": _content(body)}
    if answer is not None:
        extra["responses"] = {str(status): {"description": "Done", "content": _content(answer)} for status in statuses}
    if query is not None:
        schema = _plain(query)
        required, examples = schema.get("required", ()), schema.get("examples", ({},))[0]
        extra["parameters"] = [
            {"name": name, "in": "query", "required": name in required, "schema": field}
            | ({"example": examples[name]} if name in examples else {})
            for name, field in schema["properties"].items()
        ]
    return extra


def declares_bytes(*statuses: int) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that answers with bytes."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"responses": {str(status): {"description": "Done", "content": content} for status in statuses}}


def _content(schema: Schema) -> dict[str, Any]:
    """Return the content by media type; the example, if any, is JSON, the only type that the page can send."""
    plain = _plain(schema)
    examples = plain.pop("examples", ())
    return {
        "application/json": {"schema": plain, **({"example": examples[0]} if examples else {})},
        codec.MEDIA_TYPE: {"schema": plain},
    }


def _plain(schema: Schema) -> dict[str, Any]:
    """Return a model's schema with references replaced, so that it can be embedded in another document."""
    if not isinstance(schema, type):
        return dict(schema)
    whole = schema.model_json_schema()
    return _inlined(whole, whole.pop("$defs", {}))


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}
