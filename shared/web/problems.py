"""Problem bodies (RFC 9457), with an `error` object for OpenAI clients on the paths that they request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

MEDIA_TYPE = "application/problem+json"
_FOLDER = "/v1/"
_ROUTES = ("/completions", "/models", "/embeddings", "/responses", "/messages")
"""Ends of the paths that a client requests if its base URL lacks the folder."""


def problem_body(problem: Mapping[str, Any], path: str) -> bytes:
    """Return the body of the answer to a request for `path`. OpenAI clients show only its `error`."""
    if path.startswith(_FOLDER) or path.endswith(_ROUTES):
        message = f"{problem['detail']} ({problem['hint']})" if "hint" in problem else problem["detail"]
        problem = {**problem, "error": {"message": message, "type": problem["type"], "param": None, "code": None}}
    return orjson.dumps(problem)
