"""Problem bodies (RFC 9457), with the fields that clients of SGLang, or of an API of a package, read on their paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from shared import packages
from shared.errors import ContextExceeded, Unauthorized, Unavailable, VolleyError, WrongMethod, from_problem, problem

_GENERATE = "/generate"
MEDIA_TYPE = "application/problem+json"


def problem_body(body: Mapping[str, Any], path: str, error: VolleyError | None = None) -> bytes:
    """Return the body of the answer to a request for `path`. Args: error: the described error, if known."""
    return orjson.dumps({**body, **_client_fields(error or from_problem(body["status"], {**body}), path)})


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


def _client_fields(error: VolleyError, path: str) -> dict[str, Any]:
    """Return the fields that clients of a path read in addition to the problem body."""
    if path == _GENERATE:
        return {"error": sglang_error(error)}
    added: Callable[[VolleyError, str], dict[str, Any]] | None = packages.part("client_errors", required=False)
    return {} if added is None else added(error, path)


def sglang_error(error: VolleyError) -> dict[str, Any]:
    """Return an error as SGLang's clients read it."""
    text = str(error)
    if isinstance(error, ContextExceeded) and error.limit:
        n, new, limit = error.n_prompt, error.n_new, error.limit
        text = f"The input ({n} tokens) is longer than the model's context length ({limit} tokens)."
        if n <= limit:
            text = (
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a"
                f" total of {n + new} tokens: {n} tokens from the input messages and {new} tokens for the completion."
            )
    return {"message": text}
