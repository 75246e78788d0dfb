"""Rows of NeMo-Gym's data files: the model's input, and the response for the server.

A row is one line of JSON: `responses_create_params` with OpenAI's Responses request (`input`, `tools`, `instructions`),
and the fields of the server's verifier. Items of the Responses API become chat messages here, and the model's messages
become items again, as NeMo-Gym's own converter writes them (nemo_gym 0.4.0, responses_converter.py).
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from services.env.episode_types import Message, user
from shared import codec
from shared.errors import DecodeError, InputError
from volley_sandbox.sandbox.answers import MAX_SPLITS
from volley_serving.dialects.calls import ToolCall

MAX_ROW_BYTES, MAX_ROW_VALUES = 2**20, 20_000
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_SPLIT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_THINK, _END_THINK = "<think>", "</think>"
_TEXTS = ("input_text", "output_text", "text")
_HINT = 'a line is {"responses_create_params": {"input": [{"role": "user", "content": "…"}], "tools": […]}, …}'


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task. `sent` is the whole row, as the server receives it; `digest` is of its bytes."""

    sent: Mapping[str, Any]
    opening: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    digest: str


def check_rows(tasks: Mapping[str, bytes]) -> None:
    """Validate rows. Raises InputError naming the split and line of the first invalid row."""
    if not tasks:
        raise InputError("tasks: there are none", 'a NeMo-Gym server has no tasks; submit {"train": "JSON lines", …}')
    if len(tasks) > MAX_SPLITS or not all(_SPLIT.fullmatch(split) for split in tasks):
        raise InputError(f"tasks: use up to {MAX_SPLITS} splits, named by letters, digits, _ and -")
    for split, text in tasks.items():
        lines = lines_of(text)
        if not lines:
            raise InputError(f"tasks.{split}: there are no lines", _HINT)
        for number, line in enumerate(lines, 1):
            try:
                read_row(line)
            except InputError as error:
                raise InputError(f"tasks.{split}: line {number}: {error.detail}", error.hint) from error


def read_files(folder: Path) -> Mapping[str, Sequence[bytes]]:
    """Read the lines of each submitted split. Raises OSError. Blocks on disk."""
    return {path.stem: lines_of(path.read_bytes()) for path in sorted(folder.glob("*.jsonl"))}


def lines_of(text: bytes) -> list[bytes]:
    return [line for line in text.split(b"\n") if line.strip()]


def read_row(line: bytes) -> TaskRow:
    """Parse one row. Raises InputError."""
    if len(line) > MAX_ROW_BYTES:
        raise InputError(f"it has {len(line)} bytes; the limit is {MAX_ROW_BYTES}")
    try:
        row = codec.from_json(line, "it", MAX_ROW_VALUES, "halves")
    except DecodeError as error:
        raise InputError(error.detail, _HINT) from error
    asked = row.get("responses_create_params") if isinstance(row, dict) else None
    if not isinstance(asked, dict) or not isinstance(asked.get("input"), str | list):
        raise InputError("it has no responses_create_params with an input", _HINT)
    opening = [Message(role="system", content=asked["instructions"])] if _is_text(asked.get("instructions")) else []
    given = asked["input"]
    opening += [user(given)] if isinstance(given, str) else [_message(item) for item in given if not _is_thought(item)]
    tools = tuple(_schema(tool) for tool in asked.get("tools") or ())
    return TaskRow(row, tuple(opening), tools, hashlib.blake2b(line, digest_size=6).hexdigest())


def _thoughts(text: str) -> tuple[list[str], str]:
    """Split a text into the contents of closed <think> tags and the rest."""
    thoughts, rest, at = list[str](), list[str](), 0
    while (opened := text.find(_THINK, at)) >= 0 and (closed := text.find(_END_THINK, opened)) >= 0:
        thoughts.append(text[opened + len(_THINK) : closed])
        rest.append(text[at:opened])
        at = closed + len(_END_THINK)
    return thoughts, "".join([*rest, text[at:]])


def output_items(text: str, calls: Sequence[ToolCall], call_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Items of a response for a model's message: its thoughts, its text, its tool calls."""
    thoughts, content_text = _thoughts(text)
    items: list[dict[str, Any]] = []
    if thoughts:
        summary = [{"type": "summary_text", "text": thought} for thought in thoughts]
        items.append({"type": "reasoning", "id": _id("rs"), "summary": summary, "status": "completed"})
    if content_text or not (items or calls):
        content = [{"type": "output_text", "text": content_text, "annotations": []}]
        message = {"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed"}
        items.append({**message, "content": content})
    for call, call_id in zip(calls, call_ids, strict=True):
        arguments = orjson.dumps(call.arguments or {}).decode()
        item = {"type": "function_call", "id": call_id, "call_id": call_id, "name": call.name, "status": "completed"}
        items.append({**item, "arguments": arguments})
    return items


def tool_output(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def response(row: TaskRow, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A whole response, as a Responses API server would send it."""
    asked = row.sent["responses_create_params"]
    settings = {"tool_choice": asked.get("tool_choice") or "auto", "tools": asked.get("tools") or []}
    whole = {"id": _id("resp"), "object": "response", "created_at": 0.0, "model": "policy", "status": "completed"}
    return {**whole, **settings, "parallel_tool_calls": True, "output": list(output)}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_thought(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "reasoning"


def _message(item: Any) -> Message:
    """Convert one item of the input. Raises InputError."""
    match item:
        case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            return Message(role="assistant", content="", tool_calls=[{"id": str(item.get("call_id", "")), **call}])
        case {"type": "function_call_output", "output": str(output)}:
            return Message(role="tool", content=output)
        case {"role": str(role), "content": content} if role in _ROLES:
            return Message(role=_ROLES[role], content=_text(content))  # type: ignore[typeddict-item]
        case _:
            raise InputError(f"an item of its input is not a message: {str(item)[:120]}", _HINT)


def _text(content: Any) -> str:
    """Text of a message. Raises InputError for pictures, sound and files."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise InputError(f"a part of a message is not text: {str(part)[:120]}", "use tasks with text only")
    return "".join(part["text"] for part in parts)


def _schema(tool: Any) -> Mapping[str, Any]:
    """Convert a tool of the Responses API to the shape of chat completions. Raises InputError."""
    match tool:
        case {"type": "function", "name": str(name)}:
            known = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
            return {"type": "function", "function": {"name": name, **known}}
        case _:
            raise InputError(f"a tool is not a function: {str(tool)[:120]}", "use tools of type function only")


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
