"""OpenAI's endpoints on the same engine, for clients that send text. Streaming is refused."""

from __future__ import annotations

import bisect
import reprlib
import time
import uuid
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from services.rollout.api import schemas, validation
from services.rollout.api.generation import ClientGone
from services.rollout.api.openai_fields import honoured
from services.rollout.api.routes import Rollout, RolloutState
from services.rollout.engines.base import GenerateResult, SamplingParams
from shared.errors import InputError
from shared.models.chat import ChatTokenizer
from shared.models.messages import read_messages
from shared.web.access import Role
from shared.web.http import read_model, respond
from shared.web.openapi import declares

router = APIRouter(prefix="/v1", tags=["openai"])
ROLES = {
    "GET /v1/models": Role.VIEWER,
    "POST /v1/completions": Role.SERVICE,
    "POST /v1/chat/completions": Role.SERVICE,
}


type TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class OpenAISampling(BaseModel):
    """Fields of both endpoints; `openai_fields` checks all others."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=1e3)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=validation.MAX_TOP_K)
    n: int | None = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=0, lt=1 << 64)
    stop: str | Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=validation.MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _honoured(cls, raw: Any) -> Any:
        """Return the fields that are not null; a null field counts as absent."""
        return honoured(raw, cls.model_fields)


class Completion(OpenAISampling, json_schema_extra={"examples": [{"prompt": "2 + 2 =", "max_tokens": 8}]}):
    """`logprobs`: 0, 1 or true for the log-probabilities of the sampled tokens; there are none of others."""

    logprobs: bool | Annotated[int, Field(ge=0, le=1)] | None = None
    prompt: str | Annotated[list[TokenId], Field(fail_fast=True)]


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


_CHAT: JsonDict = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 8}


class ChatCompletion(OpenAISampling, json_schema_extra={"examples": [_CHAT]}):
    """`continue_final_message`, `add_generation_prompt` and `chat_template_kwargs` are those of vLLM and of
    transformers' `apply_chat_template`.
    """

    logprobs: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


@router.get("/models", openapi_extra=declares(answer=schemas.MODELS))
async def models(request: Request, state: Rollout) -> Response:
    model = {
        "id": _model_name(state),
        "object": "model",
        "owned_by": "volley",
        "max_model_len": state.info.context_length,
    }
    return respond(request, {"object": "list", "data": [model]})


@router.post("/completions", openapi_extra=declares(body=Completion, answer=schemas.ANSWER))
async def completions(request: Request, state: Rollout) -> Response:
    tokenizer, body = _tokenizer(state), await read_model(request, Completion)
    prompt = tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    results = await _sample(request, state, body, prompt, default_new=16)
    if results is None:
        return Response(status_code=499)
    choices = [_text_choice(tokenizer, result, i, body) for i, result in enumerate(results)]
    return respond(request, _envelope("text_completion", "cmpl", state, choices, prompt, results))


@router.post("/chat/completions", openapi_extra=declares(body=ChatCompletion, answer=schemas.ANSWER))
async def chat_completions(request: Request, state: Rollout) -> Response:
    """Answers from the tokens of the model's chat template. Fields of OpenAI, vLLM and SGLang that would change the
    answer and are not supported are refused by name; a null field is an absent one.
    """
    tokenizer, body = _tokenizer(state), await read_model(request, ChatCompletion)
    prompt = _rendered(tokenizer, body)
    results = await _sample(request, state, body, prompt, default_new=None)
    if results is None:
        return Response(status_code=499)
    choices = [_chat_choice(tokenizer, result, i, body) for i, result in enumerate(results)]
    return respond(request, _envelope("chat.completion", "chatcmpl", state, choices, prompt, results))


def _rendered(tokenizer: ChatTokenizer, body: ChatCompletion) -> list[int]:
    """Ids of the conversation, up to the header of the answer or the last word to continue. Raises InputError."""
    messages = read_messages([_with_calls(message) for message in body.messages])
    tools, header = body.tools or (), body.add_generation_prompt
    if variables := body.chat_template_kwargs:
        tokenizer.check_variables(variables)
        tokenizer = tokenizer.with_variables(variables)
    if tokenizer.leaves_out(messages, tools):
        raise InputError(
            "tools: the model's chat template does not write tools into the prompt",
            "describe them in a system message, or serve a model whose template knows tools",
        )
    if not _continues(body):
        return tokenizer.render_prompt(messages, tools, header=header is not False)
    if header:
        raise InputError(
            "add_generation_prompt=true begins a message, and the last message is to be continued", "leave one out"
        )
    if body.messages[-1].content is None:
        raise InputError(f"messages[{len(messages) - 1}] has no content to continue", "send a text, which may be empty")
    return tokenizer.render_unfinished(messages, tools)


def _continues(body: ChatCompletion) -> bool:
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


type Results = list[GenerateResult]


async def _sample(
    request: Request, state: RolloutState, body: OpenAISampling, prompt: list[int], default_new: int | None
) -> Results | None:
    """Return `body.n` results; None if the client has disconnected. Raises InputError."""
    if body.stream:
        raise InputError("stream is not supported", "leave it out: the answer comes whole")
    ids = validation.check_ids(np.array(prompt, np.int64), state.info.vocab_size)
    room = max(1, validation.room(state.info) - len(ids))
    limit = body.max_completion_tokens or body.max_tokens or min(default_new or room, room)
    requests = [validation.build(ids, _sampling(body, limit, state, i), None, state.info) for i in range(body.n or 1)]
    try:
        results = await state.generation.run(requests, request.receive)
    except ClientGone:
        return None
    return [_stopped(_tokenizer(state), result, body) for result in results]


def _sampling(body: OpenAISampling, limit: int, state: RolloutState, i: int) -> SamplingParams:
    assert state.tokenizer is not None
    ends = () if body.ignore_eos else tuple(sorted(state.tokenizer.end_ids))
    return SamplingParams(
        max_new_tokens=limit,
        temperature=1.0 if body.temperature is None else validation.computable(body.temperature),
        top_p=body.top_p or 1.0,
        top_k=body.top_k or -1,
        stop_token_ids=(*ends, *validation.check_stops(body.stop_token_ids, state.info.vocab_size)),
        ignore_eos=bool(body.ignore_eos),
        sampling_seed=None if body.seed is None else (body.seed + i) % (1 << 64),
    )


def _text_choice(tokenizer: ChatTokenizer, result: GenerateResult, i: int, body: Completion) -> dict[str, Any]:
    text, reason = _until_stop(_text(tokenizer, result, body), _stops(body), _reason(result))
    logprobs = None
    if body.logprobs is not None and body.logprobs is not False:
        tokens = [tokenizer.token(t) for t in result.output_ids.tolist()]
        logprobs = {"tokens": tokens, "token_logprobs": result.logprobs.tolist(), "top_logprobs": None}
    return {"index": i, "text": text, "finish_reason": reason, "logprobs": logprobs, **_tokens(result)}


def _chat_choice(tokenizer: ChatTokenizer, result: GenerateResult, i: int, body: ChatCompletion) -> dict[str, Any]:
    text, reason = _until_stop(_text(tokenizer, result, body), _stops(body), _reason(result))
    logprobs = None
    if body.logprobs:
        pairs = zip(result.output_ids.tolist(), result.logprobs.tolist(), strict=True)
        logprobs = {
            "content": [
                {"token": tokenizer.token(t), "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs
            ]
        }
    message = {"role": "assistant", "content": text}
    return {"index": i, "message": message, "finish_reason": reason, "logprobs": logprobs, **_tokens(result)}


def _tokens(result: GenerateResult) -> dict[str, Any]:
    """Return exact ids and weight versions, which clients that train get besides OpenAI's fields."""
    versions = [{"version": s.version, "start": s.start, "end": s.end} for s in result.versions]
    return {"token_ids": result.output_ids.tolist(), "weight_versions": versions}


def _stops(body: OpenAISampling) -> list[str]:
    return [stop for stop in ([body.stop] if isinstance(body.stop, str) else body.stop or []) if stop]


def _text(tokenizer: ChatTokenizer, result: GenerateResult, body: OpenAISampling, n: int | None = None) -> str:
    """Text of the first n sampled tokens, without the token that ended the answer."""
    ids = result.output_ids.tolist()
    ended = bool(ids) and (tokenizer.is_ended(ids) or ids[-1] == result.finish.matched)
    return tokenizer.decode(ids[: len(ids) - ended][:n], skip_special=bool(body.skip_special_tokens))


def _stopped(tokenizer: ChatTokenizer, result: GenerateResult, body: OpenAISampling) -> GenerateResult:
    """Drop the tokens after the one that completes a stop string, from ids, log-probabilities and versions."""
    length, stops = len(result.output_ids), _stops(body)

    def has_stop(n: int) -> bool:
        text = _text(tokenizer, result, body, n)
        return any(stop in text for stop in stops)

    if not stops or not has_stop(length):
        return result
    n = bisect.bisect_left(range(length), True, key=has_stop)
    versions = tuple(replace(span, end=min(span.end, n)) for span in result.versions if span.start < n)
    return replace(result, output_ids=result.output_ids[:n], logprobs=result.logprobs[:n], versions=versions)


def _until_stop(text: str, stops: list[str], reason: str) -> tuple[str, str]:
    """Cut the text at the first stop string."""
    found = [at for at in map(text.find, stops) if at >= 0]
    return (text[: min(found)], "stop") if found else (text, reason)


def _reason(result: GenerateResult) -> str:
    return {"stop": "stop", "length": "length", "abort": "abort"}[result.finish.type]


def _envelope(
    kind: str,
    prefix: str,
    state: RolloutState,
    choices: list[dict[str, Any]],
    prompt: list[int],
    results: list[GenerateResult],
) -> dict[str, Any]:
    completion = sum(len(r.output_ids) for r in results)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": completion, "total_tokens": len(prompt) + completion}
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": _model_name(state),
        "choices": choices,
        "usage": usage,
        "prompt_token_ids": prompt,
        "system_fingerprint": state.updates.current,
    }


def _model_name(state: RolloutState) -> str:
    return state.spec.model_path.rstrip("/").rpartition("/")[2]


def _tokenizer(state: RolloutState) -> ChatTokenizer:
    if state.tokenizer is None:
        raise InputError("this server has no tokenizer", "send token ids to /generate")
    return state.tokenizer
