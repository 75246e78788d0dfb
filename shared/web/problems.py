"""Problem bodies (RFC 9457), with the fields that clients of OpenAI, Anthropic and SGLang read on their paths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from shared.dialects.errors import client_fields
from shared.errors import Unauthorized, Unavailable, VolleyError, WrongMethod, from_problem, problem

MEDIA_TYPE = "application/problem+json"


def problem_body(body: Mapping[str, Any], path: str, error: VolleyError | None = None) -> bytes:
    """Return the body of the answer to a request for `path`. Args: error: the described error, if known."""
    return orjson.dumps({**body, **client_fields(error or from_problem(body["status"], {**body}), path)})


def problem_response(error: VolleyError, path: str = "") -> Response:
    """Return the answer for an error of a request for `path`."""
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))} if isinstance(error, Unavailable) else {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, WrongMethod):
        headers["Allow"] = error.allow
    return Response(problem_body(problem(error), path, error), error.status, headers, MEDIA_TYPE)


def problem_answer(body: Mapping[str, Any], headers: Mapping[str, str], path: str) -> Response:
    """Return the answer to a request for `path` with a problem body."""
    return Response(problem_body(body, path), body["status"], headers, MEDIA_TYPE)
