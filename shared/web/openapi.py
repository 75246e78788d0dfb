"""The OpenAPI document, from what routes declare beside their handlers: nothing here runs before somebody asks for it.

Bodies are JSON or msgpack, with one schema. Schemas are plain JSON schemas, or pydantic models that stand for theirs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pydantic import BaseModel

from shared import codec
from shared.web.access import Role

type Schema = Mapping[str, Any] | type[BaseModel]

_SCHEME = "bearer"
_PARAMETER = re.compile(r"{(\w+)}")

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
            "description": "The same for OpenAI's clients, where the path begins with /v1/",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": "null"},
                "code": {"type": "null"},
            },
        },
    },
    "required": ["type", "title", "status", "detail"],
}

PROBLEMS: dict[str, dict[str, Any]] = {
    code: {"description": text, "content": {"application/problem+json": {"schema": PROBLEM}}}
    for code, text in (
        ("4XX", "The request is wrong, or not now"),
        ("5XX", "The service, or one it needs, is not able to"),
    )
}
"""The answers every route may give beside its own."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What the document says of a route.

    `statuses` are those of the answers that went well; `content` is what they hold by media type, where it is no
    object; `query` is a model of the query's parameters; `examples` are of the parts of the path, by name.
    """

    body: Schema | None = None
    answer: Schema | None = None
    statuses: tuple[int, ...] = (200,)
    query: type[BaseModel] | None = None
    content: Mapping[str, Any] | None = None
    tag: str = ""
    examples: Mapping[str, str] = field(default_factory=dict[str, str])

    def within(self, tag: str, examples: Mapping[str, str]) -> Self:
        """The declaration in a group of routes that share a tag and examples; its own ones win."""
        return replace(self, tag=self.tag or tag, examples={**examples, **self.examples})


@dataclass(frozen=True, slots=True)
class Operation:
    """One route of the document. The handler lends its name and its docstring."""

    method: str
    path: str
    handler: Callable[..., Any]
    declared: Declared


def document(
    title: str, operations: Iterable[Operation], roles: Mapping[str, Role], *, secured: bool
) -> dict[str, Any]:
    """The document, OpenAPI 3.1. Where the service is `secured`, with a security scheme and with the role of every
    operation: a bearer token of that role, or of one that includes it. One that `roles` lacks asks for admin.
    """
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _described(operation)
        if secured:
            _add_role(described, roles.get(f"{operation.method} {operation.path}", Role.ADMIN))
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    whole = {"openapi": "3.1.0", "info": {"title": title, "version": "1"}, "paths": paths}
    return {**whole, "components": {"securitySchemes": {_SCHEME: _BEARER}}} if secured else whole


_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token of one of the roles viewer, service and admin, each of which includes those before it. "
    "`volley access RUN` tells in which files a run's tokens are.",
}


def _described(operation: Operation) -> dict[str, Any]:
    declared, path = operation.declared, operation.path
    described: dict[str, Any] = {
        "operationId": "_".join([operation.method.lower(), *re.findall(r"\w+", path)]),
        "summary": operation.handler.__name__.replace("_", " ").strip().capitalize(),
        "responses": _answers(declared) | PROBLEMS,
    }
    if declared.tag:
        described["tags"] = [declared.tag]
    if operation.handler.__doc__:
        described["description"] = inspect.cleandoc(operation.handler.__doc__)
    if parameters := _path_parameters(path, declared.examples) + _query_parameters(declared.query):
        described["parameters"] = parameters
    if declared.body is not None:
        described["requestBody"] = {"required": True, "content": _content(declared.body)}
    return described


def _add_role(described: dict[str, Any], role: Role) -> None:
    if role is not Role.ANYONE:
        described["security"] = [{_SCHEME: []}]
    described["x-role"] = str(role)
    described["description"] = f"{described.get('description', '')}\n\nRole: **{role}**".strip()


def _answers(declared: Declared) -> dict[str, Any]:
    content = declared.content or (_content(declared.answer) if declared.answer is not None else None)
    answer = {"description": "Done"} | ({"content": content} if content else {})
    return {str(status): answer for status in declared.statuses}


def _path_parameters(path: str, examples: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        | ({"example": examples[name]} if name in examples else {})
        for name in _PARAMETER.findall(path)
    ]


def _query_parameters(query: type[BaseModel] | None) -> list[dict[str, Any]]:
    if query is None:
        return []
    schema = _plain(query)
    required, examples = schema.get("required", ()), schema.get("examples", ({},))[0]
    return [
        {"name": name, "in": "query", "required": name in required, "schema": described}
        | ({"example": examples[name]} if name in examples else {})
        for name, described in schema["properties"].items()
    ]


def _content(schema: Schema) -> dict[str, Any]:
    """With an example where the schema has one: of JSON alone, which is what a page can send."""
    plain = _plain(schema)
    examples = plain.pop("examples", ())
    return {
        "application/json": {"schema": plain, **({"example": examples[0]} if examples else {})},
        codec.MEDIA_TYPE: {"schema": plain},
    }


def _plain(schema: Schema) -> dict[str, Any]:
    """A model's schema with references replaced by what they name, so that it can stand inside another document."""
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
