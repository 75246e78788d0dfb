"""Requests of OpenAI's Responses API: `POST /v1/responses`, without state on the server."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from shared.errors import InputError
from volley_serving.dialects.choices import read_format, read_tool_choice
from volley_serving.dialects.fields import RESPONSES_NEUTRAL, honoured
from volley_serving.dialects.openai_body import MAX_TOP_K, MAX_TOP_LOGPROBS
from volley_serving.dialects.records import Asked, Sampling
from volley_serving.templates.messages import kind, read_messages

LOGPROBS = "message.output_text.logprobs"
_EXAMPLE: JsonDict = {"input": "What is 2 + 2?", "max_output_tokens": 8}
_ITEMS = "supported items are message, reasoning, function_call and function_call_output"


class ResponsesBody(BaseModel, json_schema_extra={"examples": [_EXAMPLE]}):
    """`input` is the whole conversation: the server keeps no responses. Tools are functions."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str = ""
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=1e3)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K)
    seed: int | None = Field(None, ge=0, lt=1 << 64)
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _honoured(cls, raw: Any) -> Any:
        """Return the fields that are not null; a null field counts as absent."""
        return honoured(raw, cls.model_fields, RESPONSES_NEUTRAL)


def read(body: ResponsesBody) -> Asked:
    """Translate a body. Raises InputError naming what cannot be honoured."""
    _refuse(body)
    effort = (body.reasoning or {}).get("effort")
    tools = tuple(_tool(tool, i) for i, tool in enumerate(body.tools or ()))
    choice, name = read_tool_choice(body.tool_choice, tools)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _messages(body.input)
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return Asked(
        model=body.model,
        messages=tuple(read_messages([*system, *given], "input")),
        tools=tools,
        tool_choice=choice,
        tool_name=name,
        parallel_calls=body.parallel_tool_calls is not False,
        sampling=Sampling(
            max_tokens=body.max_output_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=body.top_p or 1.0,
            top_k=body.top_k or -1,
            seed=body.seed,
        ),
        variables=body.chat_template_kwargs or {},
        thinking=False if effort == "none" else None,
        effort=effort,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs or 0,
        schema=read_format((body.text or {}).get("format"), "text.format"),
        stream=bool(body.stream),
    )


def _refuse(body: ResponsesBody) -> None:
    """Raise InputError naming a part of a known field that cannot be honoured."""
    unknown = [name for name in body.include or () if name not in (LOGPROBS, "reasoning.encrypted_content")]
    if unknown:
        raise InputError(f"include={unknown[0][:80]!r} is not supported", "remove it from the request")
    effort = (body.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise InputError(f"reasoning.effort={reprlib.repr(effort)} is not supported", "remove it from the request")
    verbosity = (body.text or {}).get("verbosity")
    if verbosity not in (None, "medium"):
        raise InputError(f"text.verbosity={verbosity!r} is not supported", "remove it from the request")


def _tool(tool: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return a tool in the shape of chat completions. Raises InputError."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise InputError(
            f"tools[{i}]: the type {reprlib.repr(tool.get('type'))} is not supported", "only functions are called"
        )
    inner = {key: value for key, value in tool.items() if key in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {key: value for key, value in inner.items() if value is not None}}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of input items. Reasoning, text and calls of one answer become one message."""
    messages = list[dict[str, Any]]()
    for i, item in enumerate(items):
        type_ = item.get("type") or ("message" if "role" in item else None)
        at = f"input[{i}]"
        match type_:
            case "message" if item.get("role") == "assistant":
                _say(messages, item)
            case "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            case "reasoning":
                _answer(messages, new=True)["reasoning_content"] = _reasoning(item, at)
            case "function_call":
                call = {"name": item.get("name"), "arguments": item.get("arguments")}
                said = _answer(messages)
                said.setdefault("tool_calls", []).append(
                    {"id": item.get("call_id"), "type": "function", "function": call}
                )
            case "function_call_output":
                output = item.get("output")
                if not isinstance(output, str | list):
                    raise InputError(f"{at}: its output is {kind(output)}, not text")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case _:
                raise InputError(f"{at} has the type {reprlib.repr(type_)}, which is not supported", _ITEMS)
    return messages


def _say(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Add an assistant's text to the answer that the items before it began, or begin another."""
    content = item.get("content")
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and (not last["content"] or last.get("tool_calls")):
        parts = [content] if isinstance(content, str) else content or []
        before = [last["content"]] if last["content"] else []
        texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in [*before, *parts]]
        last["content"] = content if not before and isinstance(content, str) else texts
    else:
        messages.append({"role": "assistant", "content": content})


def _answer(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """Return the assistant's message that items are added to."""
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _reasoning(item: Mapping[str, Any], at: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise InputError(f"{at}: its content is {kind(parts)}, not a list of parts")
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))
