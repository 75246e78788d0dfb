"""Reader and writer of tool calls in assistant messages.

OpenAI's `tool_calls` take precedence; otherwise the text is read in one of the formats that chat templates use:

    hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>           Hermes 2 Pro, Qwen2.5, Qwen3
    qwen3_coder   <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…    Qwen3-Coder, Qwen3.5 and later
    llama3_json   {"name": …, "parameters": {…}}, also after <|python_tag|>      Llama 3.1 to 3.3
                  <|python_tag|>NAME.call(KEY=VALUE, …)                          its built-in tools
    mistral       [TOOL_CALLS][{"name": …, "arguments": {…}}], [TOOL_CALLS]NAME[ARGS]{…}

The names are those of the parsers of vLLM and SGLang, whose packages require an engine. Those parsers drop unreadable
calls, because they serve people; here the model gets an error message, so that it can learn. Text in <think> is never a
call.

Invariants: reading never raises, and takes nearly linear time; the result is JSON that can be forwarded: finite
numbers, bounded depth.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from shared.bounds import MAX_CALLS
from shared.errors import DecodeError
from volley_serving.dialects.embedded_json import MAX_ARGUMENTS, after_space, json_at

type Message = Mapping[str, Any]
"""Chat message with the keys `content` and, in OpenAI's shape, `tool_calls`."""
type CallFormat = Literal["auto", "hermes", "qwen3_coder", "llama3_json", "mistral"]


_OBJECT = "a tool call must be one JSON object with name and arguments"
_OPEN, _CLOSE, _MISTRAL, _PYTHON = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
_THINK, _END_THINK = "<think>", "</think>"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,200})>(.*?)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,200})>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]{1,200})(?:\[CALL_ID\][A-Za-z0-9_-]{1,100})?\[ARGS\]\s*")
_LONG_TEXT = 20_000
"""Characters; longer texts are read in a thread, because they would block the event loop."""
_MAX_PYTHON_CALL = 20_000
_PYTHON_CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,199})\.call\(")
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "</s>")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `problem` is set instead of the other fields if it cannot be read."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    problem: str = ""


type Schemas = Sequence[Mapping[str, Any]]


def tool_calls(message: Message, form: CallFormat = "auto", schemas: Schemas = ()) -> list[ToolCall]:
    """Read the calls of a message, in order, at most MAX_CALLS. Never raises.

    Args:
        schemas: schemas of the available tools, in OpenAI's shape; qwen3_coder needs them because it writes values
        without types.
    """
    if structured := message.get("tool_calls"):
        return [_from_openai(call) for call in structured[:MAX_CALLS]]
    return text_calls(_spoken(message["content"]), form, schemas)


def text_calls(text: str, form: CallFormat = "auto", schemas: Schemas = ()) -> list[ToolCall]:
    """Read the calls of a text without thoughts, in order, at most MAX_CALLS. Never raises."""
    readers: Mapping[str, Callable[[], Iterator[ToolCall]]] = {
        "hermes": lambda: _hermes(text),
        "qwen3_coder": lambda: _qwen3_coder(text, schemas),
        "llama3_json": lambda: _llama3_json(text),
        "mistral": lambda: _mistral(text),
    }
    return list(islice(readers[detect_format(text) if form == "auto" else form](), MAX_CALLS))


async def tool_calls_of(message: Message, form: CallFormat, schemas: Schemas) -> list[ToolCall]:
    """Read the calls of a message, in a thread if the message is long."""
    if len(message["content"]) > _LONG_TEXT:
        return await asyncio.to_thread(tool_calls, message, form, schemas)
    return tool_calls(message, form, schemas)


def detect_format(text: str) -> Literal["hermes", "qwen3_coder", "llama3_json", "mistral"]:
    """Detect the format of a text by its first mark; hermes without any mark, which finds no call."""
    marks = {name: text.find(mark) for name, mark in (("tag", _OPEN), ("mistral", _MISTRAL), ("python", _PYTHON))}
    found = {name: at for name, at in marks.items() if at >= 0}
    match min(found, key=lambda name: found[name], default=""):
        case "mistral":
            return "mistral"
        case "python":
            return "llama3_json"
        case "tag":
            inside = text[marks["tag"] + len(_OPEN) :]
            return "qwen3_coder" if inside.lstrip().startswith("<function=") else "hermes"
        case _:
            return "llama3_json" if text.lstrip().startswith("{") else "hermes"


def before_calls(text: str) -> str:
    """Text of a message before its first call, including its thoughts."""
    spoken = _spoken(text)
    thought = text[: len(text) - len(spoken)] if text.endswith(spoken) else ""
    found = [at for mark in (_OPEN, _MISTRAL, _PYTHON) if (at := spoken.find(mark)) >= 0]
    return thought + spoken[: min(found, default=0)]


def write_call(name: str, arguments: Mapping[str, Any], form: CallFormat = "hermes") -> str:
    """Write a call as text that `tool_calls` reads back."""
    if form == "qwen3_coder":
        rows = [f"<parameter={key}>\n{_plain(value)}\n</parameter>" for key, value in arguments.items()]
        return "\n".join([_OPEN, f"<function={name}>", *rows, "</function>", _CLOSE])
    if form == "llama3_json":
        return _dumps({"name": name, "parameters": arguments})
    if form == "mistral":
        return f"{_MISTRAL}[{_dumps({'name': name, 'arguments': arguments})}]"
    return f"{_OPEN}{_dumps({'name': name, 'arguments': arguments})}{_CLOSE}"


def with_calls_written(message: Message) -> str:
    """Write a message as one text: its content, then each of its `tool_calls` in the format `hermes`."""
    parts = [message["content"]] if message["content"] else []
    for structured in message.get("tool_calls", ())[:MAX_CALLS]:
        call = _from_openai(structured)
        readable = call.arguments is not None
        parts.append(
            write_call(call.name, call.arguments or {}) if readable else f"{_OPEN}{_dumps(structured)}{_CLOSE}"
        )
    return "\n".join(parts)


def _spoken(text: str) -> str:
    """Text of a message without its leading thoughts; a template may have written the opening <think>.

    A tag inside an argument belongs to the argument.
    """
    opened, closed = text.find(_THINK), text.find(_END_THINK)
    if opened >= 0 and not 0 <= closed < opened:
        begin = mark = opened
    else:
        begin, mark = 0, closed
    if mark < 0 or _in_call(text, mark):
        return text
    return text[:begin] + (text[closed + len(_END_THINK) :] if closed >= 0 else "")


def _in_call(text: str, at: int) -> bool:
    """True if position `at` is inside a call's arguments."""
    if any(0 <= text.find(mark) < at for mark in (_MISTRAL, _PYTHON)) or text.lstrip().startswith("{"):
        return True
    begun = text.rfind(_OPEN, 0, at)
    if begun < 0 or text.find(_CLOSE, begun, at) >= 0:
        return False
    inside = text[begun + len(_OPEN) : at].lstrip()
    if not inside.startswith(("{", "<function=")):
        return False
    following, closing = text.find(_OPEN, at), text.find(_CLOSE, at)
    return following < 0 or 0 <= closing < following


def _hermes(text: str) -> Iterator[ToolCall]:
    """Read calls in the format `hermes`.

    A closing tag inside an argument's text does not end the call; the last call may lack its closing tag.
    """
    at = text.find(_OPEN)
    while at >= 0:
        at += len(_OPEN)
        call, end = _json_call(text, at)
        if not call.problem:
            end = after_space(text, end)
            if end < len(text) and not text.startswith(_CLOSE, end):
                call = ToolCall(problem=f"{_OBJECT}, and {_CLOSE} after it")
        yield call
        closed = text.find(_CLOSE, end)
        at = text.find(_OPEN, closed) if closed >= 0 else -1


def _qwen3_coder(text: str, schemas: Schemas) -> Iterator[ToolCall]:
    for chunk in text.split(_OPEN)[1:]:
        yield _xml_call(chunk.partition(_CLOSE)[0], schemas)


def _xml_call(body: str, schemas: Schemas) -> ToolCall:
    if len(body) > MAX_ARGUMENTS:
        return ToolCall(problem=f"a tool call has at most {MAX_ARGUMENTS} characters")
    function = _FUNCTION.match(body)
    if function is None:
        return ToolCall(problem="a tool call must be <function=NAME> … </function>")
    name, rest = function[1].strip(), function[2]
    types, arguments, at = _types(name, schemas), dict[str, Any](), 0
    while (parameter := _PARAMETER.match(rest, at)) is not None:
        key = parameter[1].strip()
        try:
            arguments[key] = _typed(parameter[2], types.get(key))
        except DecodeError as error:
            return ToolCall(problem=f"the argument {key[:80]}: {error.detail}")
        at = parameter.end()
    if rest[at:].strip():
        return ToolCall(problem="a tool call's arguments must be <parameter=KEY> … </parameter>")
    return ToolCall(name, arguments)


def _types(name: str, schemas: Schemas) -> Mapping[str, Any]:
    """Declared type of each argument of a tool."""
    for schema in schemas:
        match schema:
            case {"function": {"name": str(found), "parameters": {"properties": dict(properties)}}} if found == name:
                return {key: _kinds(value) for key, value in properties.items() if isinstance(value, dict)}
    return {}


def _kinds(schema: Mapping[str, Any]) -> Any:
    """Type of a schema, or the types of its alternatives; None if it names none."""
    if "type" in schema:
        return schema["type"]
    options = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(options, list):
        return None
    found = [option.get("type") for option in options if isinstance(option, dict)]
    return found if found and all(isinstance(kind, str) for kind in found) else None


def _typed(text: str, kind: Any) -> Any:
    """Convert a value to its schema's type: text stays text, anything else is JSON. Raises DecodeError."""
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is None or "string" in kinds:
        return text
    try:
        return json_at(text.strip(), 0)[0]
    except ValueError:
        said = text.strip().lower()
        if "boolean" in kinds and said in ("true", "false"):  # templates write Python's True and False
            return said == "true"
        raise DecodeError(f"{text[:80]!r} is not of type {kind}") from None


def _llama3_json(text: str) -> Iterator[ToolCall]:
    """Read the whole message, or the text after <|python_tag|>. Semicolons separate calls."""
    before, tag, rest = text.partition(_PYTHON)
    rest = (rest if tag else before).strip()
    for end in _ENDS:
        rest = rest.removesuffix(end).rstrip()
    if not tag and not _looks_like_a_call(rest):
        return
    if tag and (named := _PYTHON_CALL.match(rest)) is not None:
        yield _python_call(named[1], rest)
        return
    at = 0
    while at < len(rest):
        call, at = _json_call(rest, at, ("parameters", "arguments"))
        yield call
        at = after_space(rest, at)
        if call.problem or at >= len(rest):
            return
        if rest[at] not in ";{":
            yield ToolCall(problem="calls must be separated by ; and nothing may follow them")
            return
        at = after_space(rest, at + (rest[at] == ";"))


def _python_call(name: str, text: str) -> ToolCall:
    """Read `name.call(query="…", n=3)`: named arguments, each a Python literal."""
    if len(text) > _MAX_PYTHON_CALL:
        return ToolCall(problem=f"a tool call of this form has at most {_MAX_PYTHON_CALL} characters")
    try:
        found = ast.parse(text, mode="eval").body
        if not isinstance(found, ast.Call) or found.args or any(word.arg is None for word in found.keywords):
            raise ValueError("its arguments need names")
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in found.keywords}
        return _checked({"name": name, "arguments": json_at(json.dumps(arguments, allow_nan=False), 0)[0]})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        reason = str(error).partition("(<unknown>")[0].strip()
        return ToolCall(problem=f"a tool call must be NAME.call(KEY=VALUE, …), with literals as values: {reason}")


def _looks_like_a_call(text: str) -> bool:
    """True if a text without marks begins as a call. Other JSON, or a name without arguments, is an answer."""
    if re.match(r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:', text) is None:
        return False
    try:
        found, _ = json_at(text, 0)
    except ValueError:
        return True
    return isinstance(found, dict) and ("parameters" in found or "arguments" in found)


def _mistral(text: str) -> Iterator[ToolCall]:
    for chunk in text.split(_MISTRAL)[1:]:
        for end in _ENDS:
            chunk = chunk.rstrip().removesuffix(end)
        if (named := _NAMED.match(chunk)) is not None:
            try:
                arguments, _ = json_at(chunk, named.end())
            except ValueError as error:
                yield ToolCall(problem=f"the arguments are not valid JSON: {error}")
            else:
                yield _checked({"name": named[1], "arguments": arguments})
            continue
        try:
            found, _ = json_at(chunk, after_space(chunk, 0))
        except ValueError as error:
            yield ToolCall(problem=f"{_MISTRAL} must be followed by a JSON list of calls: {error}")
            continue
        for call in found if isinstance(found, list) else [found]:
            yield _checked(call)


def _json_call(text: str, at: int, keys: Sequence[str] = ("arguments",)) -> tuple[ToolCall, int]:
    """Read the JSON object at `at` as a call; return it and its end."""
    at = after_space(text, at)
    try:
        found, end = json_at(text, at)
    except ValueError as error:
        return ToolCall(problem=f"{_OBJECT}: {error}"), at
    return _checked(found, keys), end


def _from_openai(call: object) -> ToolCall:
    """Read a call in OpenAI's shape, in which `arguments` is JSON text."""
    if not isinstance(call, dict):
        return ToolCall(problem=f"a tool call must be one JSON object, not {_kind(call)}")
    function = call.get("function", call)
    if not isinstance(function, dict):
        return ToolCall(problem=f"the function of a tool call must be one JSON object, not {_kind(function)}")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}  # some servers write calls without arguments like this
    if isinstance(arguments, str):
        try:
            arguments, end = json_at(arguments.strip(), 0)
            if end < len(arguments):
                raise ValueError("more than one value")
        except ValueError as error:
            return ToolCall(problem=f"the arguments are not valid JSON: {error}")
    return _checked({"name": function.get("name"), "arguments": arguments})


def _checked(call: Any, keys: Sequence[str] = ("arguments",)) -> ToolCall:
    arguments = next((call[key] for key in keys if key in call), None) if isinstance(call, dict) else None
    if not isinstance(call, dict):
        return ToolCall(problem=f"a tool call must be one JSON object, not {_kind(call)}")
    name = call.get("name")
    if name is None:
        return ToolCall(problem="the tool call has no name")
    if not isinstance(name, str):
        return ToolCall(problem=f"the name of a tool call must be text, not {_kind(name)}")
    if arguments is None:
        return ToolCall(problem=f"the tool call of {name[:80]} has no {keys[0]}")
    if not isinstance(arguments, dict):
        return ToolCall(problem=f"the {keys[0]} of {name[:80]} must be one JSON object, not {_kind(arguments)}")
    return ToolCall(name, arguments)


def _kind(value: Any) -> str:
    """Name of a value's type in JSON."""
    names = {bool: "true or false", str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _dumps(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
