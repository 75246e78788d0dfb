"""Digests of conversations, by which a request finds the recorded turns that it continues.

A conversation's digest is that of its tools and variables, then of one message after the other. What clients change
when they send an answer back without meaning to does not count: blanks around the assistant's text, the spacing of a
call's arguments and the order of their keys, null fields, and further fields of an assistant's message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from shared.models.messages import REASONING, arguments_of, call_of

type Digest = bytes
type ChatMessage = Mapping[str, Any]


def digest_of(*parts: Any) -> Digest:
    """Digest of values that JSON can hold, and of bytes; the order of an object's keys does not count."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else _json(part)
        made.update(len(data).to_bytes(8, "little") + data)
    return made.digest()


def root_digest(tools: Sequence[Any], variables: Mapping[str, Any]) -> Digest:
    """Digest before the first message."""
    return digest_of(list(tools), dict(variables))


def next_digest(before: Digest, message: ChatMessage, *, reasoning: bool = True) -> Digest:
    """Digest after one more message. Args: reasoning: False leaves out that of an assistant's message."""
    return digest_of(before, _canonical(message, reasoning=reasoning))


def has_reasoning(message: ChatMessage) -> bool:
    return any(message.get(key) for key in REASONING)


def _canonical(message: ChatMessage, *, reasoning: bool) -> Any:
    if message.get("role") != "assistant":
        return {key: value for key, value in message.items() if value is not None}
    calls = [
        [call.get("id"), call_of(call).get("name"), arguments_of(call)] for call in message.get("tool_calls") or ()
    ]
    said = next((message[key] for key in REASONING if message.get(key)), "") if reasoning else ""
    return ["assistant", (message.get("content") or "").strip(), calls, said.strip()]


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # an integer beyond 64 bits, or half of a surrogate pair
        return json.dumps(value, sort_keys=True, default=str).encode()
