"""Errors as the clients of each API read them.

Clients decide by these names and texts: an agent shortens its conversation after `context_length_exceeded` (OpenAI) or
"prompt is too long" (Anthropic), and waits after `rate_limit_error`. The codes are those of the error tree
(`VolleyError.api_code`), the same from a rollout server and from the recorder of agents.
"""

from __future__ import annotations

from typing import Any

from shared.errors import ContextExceeded, VolleyError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Kinds of errors that both APIs have, by status."""
_ANTHROPIC = ("/messages", "/messages/count_tokens")
_OPENAI = ("/completions", "/models", "/embeddings", "/responses")
"""Ends of the paths that a client requests, also if its base URL lacks the folder."""
_FOLDER = "/v1/"


def client_fields(error: VolleyError, path: str) -> dict[str, Any]:
    """Return what the clients of a path read beside a problem body; nothing on the paths of other clients.

    Entry point `client_errors` of `volley.parts`.
    """
    if path.endswith(_ANTHROPIC):
        return {"type": "error", "error": anthropic_error(error)}
    if path.startswith(_FOLDER) or path.endswith(_OPENAI):
        return {"error": openai_error(error)}
    return {}


def openai_error(error: VolleyError) -> dict[str, Any]:
    return {"message": str(error), "type": _kind(error), "param": None, "code": error.api_code}


def anthropic_error(error: VolleyError) -> dict[str, Any]:
    text = str(error)
    if isinstance(error, ContextExceeded) and error.limit:
        n, new, limit = error.n_prompt, error.n_new, error.limit
        text = f"prompt is too long: {n} tokens > {limit} maximum"
        if n <= limit:
            text = f"input length and `max_tokens` exceed context limit: {n} + {new} > {limit}"
    return {"type": _kind(error), "message": text}


def _kind(error: VolleyError) -> str:
    return _KINDS.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
