"""Tool calls as models write them: OpenAI's `tool_calls`, or Qwen's `<tool_call>{"name": …, "arguments":
{…}}</tool_call>` in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.env.environments.base import Message

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `problem` is set instead of the rest when it cannot be read."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    problem: str = ""


def tool_calls(message: Message) -> list[ToolCall]:
    """The calls of a message, in order: its `tool_calls` if it has any, else those tagged in its text. Never raises."""
    if structured := message.get("tool_calls"):
        return [_from_openai(call) for call in structured]
    return [_from_text(body) for body in _TAGGED.findall(message["content"])]


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text that `tool_calls` reads back."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, separators=(",", ":"))
    return f"<tool_call>{call}</tool_call>"


def _from_text(body: str) -> ToolCall:
    try:
        return _checked(json.loads(body))
    except (ValueError, RecursionError):
        return ToolCall(problem="a tool call must be one JSON object with name and arguments")


def _from_openai(call: object) -> ToolCall:
    """OpenAI's shape, in which `arguments` is JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return ToolCall(problem="a tool call must have a function with name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(problem="the arguments are not valid JSON")
    return _checked({"name": function.get("name"), "arguments": arguments})


def _checked(call: Any) -> ToolCall:
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments)
        case _:
            return ToolCall(problem="a tool call must be one JSON object with name and arguments")
