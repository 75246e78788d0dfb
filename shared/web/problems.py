"""Problem bodies (RFC 9457), with the `error` object that OpenAI's clients read on the paths that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

MEDIA_TYPE = "application/problem+json"
_FOLDER = "/v1/"
_ROUTES = ("/completions", "/models", "/embeddings", "/responses")
"""Ends of paths that a client asks for whose base URL lacks the folder."""


def problem_body(problem: Mapping[str, Any], path: str) -> bytes:
    """The body of the answer to a request for `path`. An OpenAI client shows nothing of it but `error`."""
    if path.startswith(_FOLDER) or path.endswith(_ROUTES):
        message = f"{problem['detail']} ({problem['hint']})" if "hint" in problem else problem["detail"]
        problem = {**problem, "error": {"message": message, "type": problem["type"], "param": None, "code": None}}
    return orjson.dumps(problem)
