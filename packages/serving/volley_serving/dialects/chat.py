"""Chat completions of OpenAI: `POST /v1/chat/completions`, as OpenAI, vLLM and SGLang define it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from shared.errors import InputError, VolleyError
from shared.models.chat import ChatTokenizer
from volley_serving.dialects.choices import read_format, read_tool_choice
from volley_serving.dialects.errors import openai_error
from volley_serving.dialects.events import event
from volley_serving.dialects.openai_body import MAX_TOP_LOGPROBS, SamplingBody
from volley_serving.dialects.records import (
    AnswerContent,
    Answered,
    Asked,
    Call,
    Head,
    Piece,
    Reasoning,
    Sampled,
    Usage,
)
from volley_serving.templates.messages import read_messages

_EXAMPLE: JsonDict = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 8}


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class ChatBody(SamplingBody, json_schema_extra={"examples": [_EXAMPLE]}):
    """`continue_final_message`, `add_generation_prompt` and `chat_template_kwargs` are those of vLLM and of
    transformers' `apply_chat_template`.
    """

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None


def read(body: ChatBody) -> Asked:
    """Translate a body. Raises InputError naming what cannot be honoured."""
    continues, header = _continues(body), body.add_generation_prompt
    tools = tuple(body.tools or ())
    choice, name = read_tool_choice(body.tool_choice, tools)
    if continues and header:
        raise InputError(
            "add_generation_prompt=true begins a message, and the last message is to be continued", "leave one out"
        )
    if continues and body.messages[-1].content is None:
        raise InputError(
            f"messages[{len(body.messages) - 1}] has no content to continue", "send a text, which may be empty"
        )
    if choice == "required" and (continues or header is False):
        raise InputError(f"tool_choice={reprlib.repr(body.tool_choice)} begins a message with a call", "leave one out")
    return Asked(
        model=body.model,
        messages=tuple(read_messages([_with_calls(message) for message in body.messages])),
        tools=tools,
        tool_choice=choice,
        tool_name=name,
        parallel_calls=body.parallel_tool_calls is not False,
        sampling=body.sampling(),
        variables=body.chat_template_kwargs or {},
        thinking=False if body.reasoning_effort == "none" else None,
        effort=body.reasoning_effort,
        continues=continues,
        header=header is not False,
        n=body.n or 1,
        logprobs=bool(body.logprobs),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        token_names=bool(body.return_tokens_as_token_ids),
        schema=read_format(body.response_format, "response_format"),
        stream=bool(body.stream),
        include_usage=body.wants_usage(),
    )


def _continues(body: ChatBody) -> bool:
    """Return whether the answer continues the last message.

    Clients say so by `continue_final_message`, or by DeepSeek's `prefix` or Moonshot's `partial` on the message itself.
    Raises InputError naming such a mark that has no meaning.
    """
    marks = [
        (i, name, value)
        for i, message in enumerate(body.messages)
        for name in ("prefix", "partial")
        if (value := (message.model_extra or {}).get(name)) not in (None, False)
    ]
    for i, name, value in marks:
        if value is not True or i + 1 < len(body.messages) or body.messages[i].role != "assistant":
            raise InputError(
                f"messages[{i}]: {name}={reprlib.repr(value)} is not supported",
                f"{name}=true may stand in the last message, if it is the assistant's",
            )
    return bool(body.continue_final_message or marks)


def _with_calls(message: ChatMessage) -> dict[str, Any]:
    """Return the message with null content as empty text, and OpenAI's older `function_call` in `tool_calls`."""
    raw = {**message.model_dump(), "content": message.content or ""}
    call = raw.pop("function_call", None)
    return raw if not call or raw.get("tool_calls") else {**raw, "tool_calls": [{"type": "function", "function": call}]}


def write(
    asked: Asked, head: Head, answers: Sequence[Answered], usage: Usage, tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """Write finished answers as the JSON of a `chat.completion`."""
    choices = [
        {
            "index": i,
            "message": message_of(answer),
            "finish_reason": answer.finish_reason,
            "logprobs": {"content": token_rows(answer.sampled, token_writer(asked, tokenizer))}
            if asked.logprobs
            else None,
            **exact_tokens(answer.sampled),
        }
        for i, answer in enumerate(answers)
    ]
    return {**envelope("chat.completion", "chatcmpl", head), "choices": choices, "usage": write_usage(usage)}


def message_of(answer: Answered) -> dict[str, Any]:
    """Write an answer as the assistant's message, which an agent sends back."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message |= {"content": answer.content or None, "tool_calls": [_call(call) for call in answer.calls]}
    return message


class ChatStream:
    """Encoder of `chat.completion.chunk` events. See `AnswerStream`."""

    def __init__(self, asked: Asked, head: Head, tokenizer: ChatTokenizer) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self._envelope = envelope("chat.completion.chunk", "chatcmpl", head)
        self._n_calls = [0] * asked.n

    def begin(self, n_prompt: int = 0) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(i, role) for i in range(self._asked.n))

    def add(self, i: int, pieces: Sequence[Piece], sampled: Sampled | None = None) -> bytes:
        deltas = [self._delta(i, piece) for piece in pieces]
        logprobs = None
        if self._asked.logprobs and sampled is not None and len(sampled.ids):
            logprobs = {"content": token_rows(sampled, token_writer(self._asked, self._tokenizer))}
            deltas = deltas or [{"content": ""}]
        chunks = [self._chunk(i, delta, logprobs=None if n else logprobs) for n, delta in enumerate(deltas)]
        return b"".join(chunks)

    def finish(self, i: int, answer: Answered) -> bytes:
        return self._chunk(i, {}, answer.finish_reason, exact=exact_tokens(answer.sampled))

    def end(self, usage: Usage) -> bytes:
        counted = event({**self._envelope, "choices": [], "usage": write_usage(usage)})
        return (counted if self._asked.include_usage else b"") + DONE

    def fail(self, error: VolleyError) -> bytes:
        return event({"error": openai_error(error)}) + DONE

    def _delta(self, i: int, piece: Piece) -> dict[str, Any]:
        match piece:
            case Reasoning(text):
                return {"reasoning_content": text}
            case AnswerContent(text):
                return {"content": text}
            case Call():
                self._n_calls[i] += 1
                return {"tool_calls": [{"index": self._n_calls[i] - 1, **_call(piece)}]}

    def _chunk(
        self,
        i: int,
        delta: Mapping[str, Any],
        reason: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
        exact: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **(exact or {})}
        usage = {"usage": None} if self._asked.include_usage else {}
        return event({**self._envelope, "choices": [choice], **usage})


DONE = b"data: [DONE]\n\n"


def envelope(kind: str, prefix: str, head: Head) -> dict[str, Any]:
    """Write the fields of a completion or a chunk beside its choices."""
    return {
        "id": f"{prefix}-{head.id}",
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.version,
    }


def write_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def exact_tokens(sampled: Sampled) -> dict[str, Any]:
    """Return exact ids and weight versions, which clients that train get besides OpenAI's fields."""
    versions = [{"version": s.version, "start": s.start, "end": s.end} for s in sampled.versions]
    return {"token_ids": sampled.ids.tolist(), "weight_versions": versions}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def token_writer(asked: Asked, tokenizer: ChatTokenizer) -> Callable[[int], str]:
    """Return the function that writes a token of log-probabilities: as text, or by its id if the request asks so."""
    return "token_id:{}".format if asked.token_names else tokenizer.token


def token_rows(sampled: Sampled, text: Callable[[int], str]) -> list[dict[str, Any]]:
    """Write tokens with their log-probabilities and the most likely tokens beside them."""
    rows: list[dict[str, Any]] = []
    for n, (token, logprob) in enumerate(zip(sampled.ids.tolist(), sampled.logprobs.tolist(), strict=True)):
        top = sampled.top
        pairs = [] if top is None else zip(top.ids[n].tolist(), top.logprobs[n].tolist(), strict=True)
        others = [_token(text(other), p) for other, p in pairs]
        rows.append({**_token(text(token), logprob), "top_logprobs": others})
    return rows


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
