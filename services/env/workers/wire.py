"""What a worker process and the service say to each other: JSON values, a line each.

Both ends are ours. NaN is kept: what the service takes from a client reaches the environment unchanged. U+FFFD replaces
halves of surrogate pairs in what an environment answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from services.env.episode_types import Demonstration, Info, StepResult
from shared.text import without_halves

MAX_LINE = 2**28
"""Bytes."""


def encode(value: Mapping[str, Any]) -> bytes:
    """One line. Raises TypeError, ValueError for what is no JSON."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next value; None when the other end is closed. Raises ConnectionError for a line that was cut."""
    line = await reader.readline()
    if line and not line.endswith(b"\n"):
        raise ConnectionResetError("the last line is not whole")
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
