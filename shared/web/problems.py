"""Problem bodies (RFC 9457), with an `error` object for OpenAI clients on the paths that they request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from shared.errors import Unauthorized, Unavailable, VolleyError, WrongMethod, problem

MEDIA_TYPE = "application/problem+json"
_FOLDER = "/v1/"
_ROUTES = ("/completions", "/models", "/embeddings", "/responses", "/messages")
"""Ends of the paths that a client requests if its base URL lacks the folder."""


def problem_body(body: Mapping[str, Any], path: str) -> bytes:
    """Return the body of the answer to a request for `path`. OpenAI clients show only its `error`."""
    if path.startswith(_FOLDER) or path.endswith(_ROUTES):
        message = f"{body['detail']} ({body['hint']})" if "hint" in body else body["detail"]
        body = {**body, "error": {"message": message, "type": body["type"], "param": None, "code": None}}
    return orjson.dumps(body)


def problem_response(error: VolleyError, path: str = "") -> Response:
    """Return the answer for an error of a request for `path`."""
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))} if isinstance(error, Unavailable) else {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, WrongMethod):
        headers["Allow"] = error.allow
    return problem_answer(problem(error), headers, path)


def problem_answer(body: dict[str, Any], headers: Mapping[str, str], path: str) -> Response:
    """Return the answer to a request for `path` with a problem body."""
    return Response(problem_body(body, path), body["status"], headers, MEDIA_TYPE)
