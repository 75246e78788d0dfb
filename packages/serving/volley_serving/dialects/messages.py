"""Requests of Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from shared.errors import InputError
from volley_serving.dialects.choices import read_format, read_tool_choice
from volley_serving.dialects.fields import MESSAGES_NEUTRAL, honoured
from volley_serving.dialects.openai_body import MAX_TOP_K
from volley_serving.dialects.records import Asked, Sampling
from volley_serving.templates.messages import kind, read_messages

_EXAMPLE: JsonDict = {"max_tokens": 8, "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountBody(BaseModel, json_schema_extra={"examples": [{"messages": _EXAMPLE["messages"]}]}):
    """`thinking` reaches chat templates that can turn it off; its budget has no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str = ""
    messages: Annotated[list[MessagesMessage], Field(min_length=1, fail_fast=True)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _honoured(cls, raw: Any) -> Any:
        """Return the fields that are not null; a null field counts as absent."""
        return honoured(raw, cls.model_fields, MESSAGES_NEUTRAL)


class MessagesBody(CountBody, json_schema_extra={"examples": [_EXAMPLE]}):
    """An assistant's message at the end is continued. `thinking` reaches chat templates that can turn it off, without
    its budget.
    """

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=1e3)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K)
    seed: int | None = Field(None, ge=0, lt=1 << 64)
    stop_sequences: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = None


def read(body: CountBody) -> Asked:
    """Translate a body. Raises InputError naming what cannot be honoured."""
    tools = tuple(_tool(tool, i) for i, tool in enumerate(body.tools or ()))
    given = body.tool_choice or {"type": "auto"}
    wanted: Any = given
    match given:
        case {"type": "tool", "name": name}:
            wanted = {"type": "function", "function": {"name": name}}
        case {"type": str(type_)}:
            wanted = _CHOICES.get(type_, given)
    choice, name = read_tool_choice(wanted, tools)
    messages = [{"role": "system", "content": _texts(body.system, "system")}] if body.system else []
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    asked = Asked(
        model=body.model,
        messages=tuple(read_messages(messages)),
        tools=tools,
        tool_choice=choice,
        tool_name=name,
        parallel_calls=given.get("disable_parallel_tool_use") is not True,
        variables=body.chat_template_kwargs or {},
        thinking=None if body.thinking is None else body.thinking.get("type") != "disabled",
        continues=body.messages[-1].role == "assistant",
    )
    return _sampled(asked, body) if isinstance(body, MessagesBody) else asked


def _sampled(asked: Asked, body: MessagesBody) -> Asked:
    config = body.output_config or {}
    if unknown := [name for name in config if name not in ("format", "effort") and config[name] is not None]:
        raise InputError(f"output_config.{unknown[0][:80]} is not supported", "remove it from the request")
    sampling = Sampling(
        max_tokens=body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=body.top_p or 1.0,
        top_k=body.top_k or -1,
        stop=tuple(body.stop_sequences or ()),
        seed=body.seed,
    )
    schema = read_format(config.get("format"), "output_config.format")
    effort = config.get("effort")
    if not isinstance(effort, str | None):
        raise InputError(f"output_config.effort={reprlib.repr(effort)} is not supported", "remove it from the request")
    return replace(asked, sampling=sampling, effort=effort, schema=schema, stream=bool(body.stream))


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return a tool in the shape of OpenAI's. Raises InputError."""
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        raise InputError(
            f"tools[{i}]: the type {reprlib.repr(tool.get('type'))} is not supported",
            "only tools with a name and an input_schema are called",
        )
    inner = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": {key: value for key, value in inner.items() if value is not None}}


def _messages(message: MessagesMessage, at: str) -> list[dict[str, Any]]:
    """Return the messages of one message: each result of a tool becomes its own. Raises InputError."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, at)]
    results, texts = list[dict[str, Any]](), list[Mapping[str, Any]]()
    for i, block in enumerate(message.content):
        if block.get("type") == "tool_result":
            content = _texts(block.get("content") or "", f"{at}.content[{i}]")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            texts.append(block)
    said = [{"role": message.role, "content": _texts(texts, at)}] if texts or not results else []
    return [*results, *said]


def _assistant(blocks: Sequence[Mapping[str, Any]], at: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    for i, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                made["content"] += text
            case {"type": "thinking", "thinking": str(text)}:
                made["reasoning_content"] = made.get("reasoning_content", "") + text
            case {"type": "tool_use", "name": name, "input": arguments}:
                text = json.dumps(arguments, ensure_ascii=False)
                call = {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": text}}
                made.setdefault("tool_calls", []).append(call)
            case _:
                raise _unknown(block, f"{at}.content[{i}]")
    return made


def _texts(content: Any, at: str) -> str:
    """Return the text of blocks. Raises InputError for one that has none."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InputError(f"{at}: its content is {kind(content)}, not text")
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise _unknown(block, at)
    return "".join(block["text"] for block in content)


def _unknown(block: Any, at: str) -> InputError:
    type_ = block.get("type") if isinstance(block, Mapping) else None
    return InputError(
        f"{at} has a block of type {reprlib.repr(type_)}, which is not supported",
        "supported blocks are text, thinking, tool_use and tool_result",
    )
