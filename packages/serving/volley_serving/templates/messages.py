"""Messages of a conversation, normalised from files and OpenAI's clients to the form that templates expect.

Chat templates expect content as text. OpenAI's clients also write content as a list of parts, or null beside a call.
Demonstrations and `/v1/chat/completions` both read messages here, so templates get the same values. The arguments of a
call stay as given, an object or its JSON text; `shared.models.templates` converts them to the form that a template
expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import InputError
from shared.models.messages import REASONING, call_of, parsed

ROLES = ("system", "developer", "user", "assistant", "tool")
_PARTS = ("text", "input_text", "output_text", "refusal")
_CALL = 'a call is {"function": {"name": "…", "arguments": {…}}}'


def read_messages(value: Any, key: str = "messages") -> list[dict[str, Any]]:
    """Normalise a list of messages; `key` names it in errors. Raises InputError."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InputError(f"{key} is {kind(value)}, not a list of messages", 'each is {"role": …, "content": …}')
    return [_message(one, f"{key}[{i}]") for i, one in enumerate(value)]


def read_tools(value: Any, key: str = "tools") -> list[dict[str, Any]]:
    """Read the JSON schemas of tools, also from JSON text, as in Parquet files. Raises InputError naming `key`."""
    tools = parsed(value) if isinstance(value, str) else value
    if tools is None or tools == []:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{key} is {kind(tools)}, not a list of JSON schemas")
    return tools


def kind(value: Any) -> str:
    """Name of a value's type in JSON, with its article."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return "an empty list" if value == [] else names.get(type(value), "a number")


def _message(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{at} is {kind(value)}, not a message", 'each is {"role": …, "content": …}')
    role = value.get("role")
    if role is None:
        raise InputError(f"{at} has no role", f"roles are {', '.join(ROLES)}")
    if role not in ROLES:
        raise InputError(f"{at} has the unknown role {str(role)[:50]!r}", f"roles are {', '.join(ROLES)}")
    calls = value.get("tool_calls")
    if calls and role != "assistant":
        raise InputError(f"{at}: only the assistant has tool_calls")
    made = {key: one for key, one in value.items() if one is not None or key == "content"}
    if calls:
        made["tool_calls"] = _calls(calls, at)
    else:
        made.pop("tool_calls", None)
    for key in REASONING:
        if role == "assistant" and not isinstance(made.get(key, ""), str):
            raise InputError(f"{at}: its {key} is {kind(made[key])}, not text")
    content = _spoken(value, at) if role == "assistant" else value.get("content")
    said_otherwise = role == "assistant" and any(made.get(key) for key in ("tool_calls", "function_call", *REASONING))
    made["content"] = "" if said_otherwise and content is None else _text(content, at)
    return made


def _spoken(value: Mapping[str, Any], at: str) -> Any:
    """Content of an assistant's message, or OpenAI's `refusal` instead."""
    content, refusal = value.get("content"), value.get("refusal")
    if value.get("audio"):
        raise InputError(f"{at} has audio, and chat templates write text alone", "send what it says as content")
    if not refusal:
        return content
    if content:
        raise InputError(f"{at} has both content and a refusal", "keep the one that the assistant said")
    if not isinstance(refusal, str):
        raise InputError(f"{at}: its refusal is {kind(refusal)}, not text")
    return refusal


def _text(content: Any, at: str) -> str:
    """Content as text; texts of its parts are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InputError(f"{at}: its content is {kind(content)}, not text")
    texts = list[str]()
    for part in content:
        type_ = part.get("type", "text") if isinstance(part, Mapping) else None
        if type_ in ("thinking", "reasoning"):
            raise InputError(f"{at} has a part of type {type_}", f"write its text as {REASONING[0]} of the message")
        text = part.get("refusal" if type_ == "refusal" else "text") if type_ in _PARTS else None
        if not isinstance(text, str):
            raise InputError(f"{at} has parts that are no text: images and sounds cannot be trained on")
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InputError(f"{at}: tool_calls is {kind(calls)}, not a list", _CALL)
    return [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, at: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise InputError(f"{at} is {kind(call)}, not an object", _CALL)
    inner = call_of(call)
    if not isinstance(inner, Mapping):
        raise InputError(f"{at}: its function is {kind(inner)}, not an object", _CALL)
    name, given = inner.get("name"), inner.get("arguments")
    if not isinstance(name, str) or not name:
        raise InputError(f"{at} has no name" if name in (None, "") else f"{at}: its name is {kind(name)}", _CALL)
    arguments = parsed(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict | None):
        what = "text that is not a JSON object" if isinstance(given, str) else kind(given)
        raise InputError(f"{at}: its arguments are {what}", _CALL)
    function = {**inner, "arguments": given if arguments else {}}
    return {**call, "type": "function", "function": function} if call.get("function") else function
