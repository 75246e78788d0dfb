"""Messages of a conversation as chat templates expect them, and the values of their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shared.text import without_halves

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold its reasoning, in the order in which transformers looks for it."""


def call_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Object with a call's name and arguments; in older formats the call itself."""
    return call.get("function") or call


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call, as an object."""
    given = call_of(call).get("arguments")
    return (parsed(given) if isinstance(given, str) else given) or {}


def with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasoning also as `reasoning_content` and `thinking`, which are what templates read, as in
    transformers 5.
    """
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def parsed(text: str) -> Any:
    """Parse JSON text: the text itself if it is not JSON, None if it is empty."""
    try:
        return json.loads(without_halves(text.encode("utf-8", "surrogatepass"))) if text.strip() else None
    except (ValueError, RecursionError):
        return text
