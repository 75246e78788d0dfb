"""Protocol between a worker process and the service: JSON values, one per line.

Both ends are Volley's. NaN is preserved, so that a client's message reaches the environment unchanged. In an
environment's answers, U+FFFD replaces lone surrogates.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from services.env.episode_types import Demonstration, Info, StepResult
from shared.text import without_halves

MAX_LINE = 2**28
"""Bytes of one line."""


def encode(value: Mapping[str, Any]) -> bytes:
    """Encode one line. Raises TypeError, ValueError for a value that is not JSON."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Read the next value; None when the other end is closed. Raises ConnectionError for a truncated line."""
    line = await reader.readline()
    if line and not line.endswith(b"\n"):
        raise ConnectionResetError("the last line is truncated")
    return json.loads(without_halves(line)) if line else None


def of_step(result: StepResult) -> dict[str, Any]:
    info = result.info
    return {
        "messages": list(result.messages),
        "reward": float(result.reward),
        "terminated": bool(result.terminated),
        "truncated": bool(result.truncated),
        "components": dict(info.reward_components),
        "success": bool(info.success),
        "error": info.error,
        "extra": dict(info.extra),
    }


def step_of(value: Mapping[str, Any]) -> StepResult:
    info = Info(value["components"], value["success"], value["error"], value["extra"])
    return StepResult(tuple(value["messages"]), value["reward"], value["terminated"], value["truncated"], info)


def of_demonstration(shown: Demonstration) -> dict[str, Any]:
    return {"messages": list(shown.messages), "success": bool(shown.success), "tools": list(shown.tools)}


def demonstration_of(value: Mapping[str, Any]) -> Demonstration:
    return Demonstration(tuple(value["messages"]), value["success"], tuple(value["tools"]))
