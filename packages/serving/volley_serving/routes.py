"""Routes of OpenAI and Anthropic on a rollout server's engine, for clients that send text."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.rollout.api.generation import ClientGone
from services.rollout.api.routes import Rollout, RolloutState
from shared.errors import InputError, ModelNotFound
from shared.models.chat import ChatTokenizer
from shared.process import offload
from shared.web.access import Role
from shared.web.http import read_model, respond
from shared.web.openapi import declares
from shared.web.routes import ServiceRoutes
from volley_serving import schemas
from volley_serving.answer_sampler import AnswerSampler
from volley_serving.dialects.completions import with_ids
from volley_serving.dialects.dialect import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Dialect
from volley_serving.dialects.messages import CountBody
from volley_serving.dialects.messages import read as read_count
from volley_serving.dialects.prompts import Prompt, render
from volley_serving.dialects.records import Asked, Head
from volley_serving.event_stream import EventStream

router = APIRouter(prefix="/v1", tags=["openai"])
ROLES = {
    "GET /v1/models": Role.VIEWER,
    "GET /v1/models/{name}": Role.VIEWER,
    "POST /v1/responses": Role.SERVICE,
    "POST /v1/messages": Role.SERVICE,
    "POST /v1/messages/count_tokens": Role.SERVICE,
    "POST /v1/completions": Role.SERVICE,
    "POST /v1/chat/completions": Role.SERVICE,
}
ROUTES = ServiceRoutes(router, ROLES)


@router.get("/models", openapi_extra=declares(answer=schemas.MODELS))
async def models(request: Request, state: Rollout) -> Response:
    one = _model(state)
    return respond(
        request, {"object": "list", "data": [one], "first_id": one["id"], "last_id": one["id"], "has_more": False}
    )


@router.get("/models/{name}", openapi_extra=declares(answer=schemas.SERVED_MODEL))
async def model(request: Request, name: str, state: Rollout) -> Response:
    if name != _model_name(state):
        raise ModelNotFound(f"this server has no model {name[:80]!r}", f"its model is {_model_name(state)}")
    return respond(request, _model(state))


@router.post("/completions", openapi_extra=declares(body=COMPLETIONS.body, answer=schemas.ANSWER))
async def complete_text(request: Request, state: Rollout) -> Response:
    """Continues texts or token ids, one or a batch."""
    body, tokenizer = await read_model(request, COMPLETIONS.body), _tokenizer(state)
    asked = await offload.tokenizing(lambda: with_ids(COMPLETIONS.read(body), tokenizer))
    prompts = [Prompt([*ids]) for ids in asked.prompts if not isinstance(ids, str)]
    return await _respond(request, state, COMPLETIONS, asked, prompts)


@router.post("/chat/completions", openapi_extra=declares(body=CHAT.body, answer=schemas.ANSWER))
async def complete_chat(request: Request, state: Rollout) -> Response:
    """Answers from the tokens of the model's chat template. Fields of OpenAI, vLLM and SGLang that would change the
    answer and are not supported are refused by name; a null field is an absent one.
    """
    return await _converse(request, state, CHAT)


@router.post("/responses", openapi_extra=declares(body=RESPONSES.body, answer=schemas.RESPONSE))
async def respond_to_input(request: Request, state: Rollout) -> Response:
    """Answers as OpenAI's Responses API, without state: `input` is the whole conversation."""
    return await _converse(request, state, RESPONSES)


@router.post("/messages", openapi_extra=declares(body=MESSAGES.body, answer=schemas.MESSAGE))
async def answer_messages(request: Request, state: Rollout) -> Response:
    """Answers as Anthropic's Messages API."""
    return await _converse(request, state, MESSAGES)


@router.post("/messages/count_tokens", openapi_extra=declares(body=CountBody, answer=schemas.COUNT))
async def count_tokens(request: Request, state: Rollout) -> Response:
    """Counts the tokens of a prompt."""
    body, tokenizer = await read_model(request, CountBody), _tokenizer(state)
    prompt = await offload.tokenizing(lambda: render(read_count(body), tokenizer))
    return respond(request, {"input_tokens": len(prompt.ids)})


async def _converse(request: Request, state: RolloutState, dialect: Dialect[Any]) -> Response:
    body, tokenizer = await read_model(request, dialect.body), _tokenizer(state)

    def read() -> tuple[Asked, Prompt]:
        asked = dialect.read(body)
        return asked, render(asked, tokenizer)

    asked, prompt = await offload.tokenizing(read)
    return await _respond(request, state, dialect, asked, [prompt])


async def _respond(
    request: Request, state: RolloutState, dialect: Dialect[Any], asked: Asked, prompts: Sequence[Prompt]
) -> Response:
    """Answer with JSON, or with events if the request asks for a stream. Raises InputError."""
    if asked.schema is not None and "grammar" not in state.info.options:
        hint = "leave it out: this server's engine cannot force an answer into a format"
        raise InputError(f"{dialect.format_key}={reprlib.repr(asked.schema)} is not supported", hint)
    sampler, tokenizer = AnswerSampler(state, asked, prompts, dialect.default_tokens), _tokenizer(state)
    head = Head(_model_name(state), state.updates.current)
    if asked.stream:
        stream = dialect.stream(asked, head, tokenizer)
        return EventStream(lambda put, receive: sampler.stream(stream, put, receive), stream.fail)
    try:
        answers, usage = await sampler.sample(request.receive)
    except ClientGone:
        return Response(status_code=499)
    body = dialect.write(asked, head, answers, usage, tokenizer)
    return respond(request, body | ({"prompt_token_ids": prompts[0].ids} if len(prompts) == 1 else {}))


def _model(state: RolloutState) -> dict[str, Any]:
    """Describe the model to clients of OpenAI and of Anthropic."""
    name = _model_name(state)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "volley",
        "max_model_len": state.info.context_length,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _model_name(state: RolloutState) -> str:
    return state.model_name


def _tokenizer(state: RolloutState) -> ChatTokenizer:
    if state.tokenizer is None:
        raise InputError("this server has no tokenizer", "send token ids to /generate")
    return state.tokenizer
