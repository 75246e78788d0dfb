"""OpenAI's routes on the same engine, for clients that send text (shared.dialects)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.rollout.api import schemas
from services.rollout.api.answer_sampler import AnswerSampler
from services.rollout.api.event_stream import EventStream
from services.rollout.api.generation import ClientGone
from services.rollout.api.routes import Rollout, RolloutState
from shared.dialects.dialect import CHAT, COMPLETIONS, Dialect
from shared.dialects.prompts import Prompt, render
from shared.dialects.records import Asked, Head
from shared.errors import InputError
from shared.models.chat import ChatTokenizer
from shared.web.access import Role
from shared.web.http import read_model, respond
from shared.web.openapi import declares

router = APIRouter(prefix="/v1", tags=["openai"])
ROLES = {
    "GET /v1/models": Role.VIEWER,
    "POST /v1/completions": Role.SERVICE,
    "POST /v1/chat/completions": Role.SERVICE,
}


@router.get("/models", openapi_extra=declares(answer=schemas.MODELS))
async def models(request: Request, state: Rollout) -> Response:
    model = {
        "id": _model_name(state),
        "object": "model",
        "owned_by": "volley",
        "max_model_len": state.info.context_length,
    }
    return respond(request, {"object": "list", "data": [model]})


@router.post("/completions", openapi_extra=declares(body=COMPLETIONS.body, answer=schemas.ANSWER))
async def complete_text(request: Request, state: Rollout) -> Response:
    """Continues texts or token ids, one or a batch."""
    asked, tokenizer = COMPLETIONS.read(await read_model(request, COMPLETIONS.body)), _tokenizer(state)
    prompts = [Prompt(tokenizer.encode(one) if isinstance(one, str) else [*one]) for one in asked.prompts]
    return await _respond(request, state, COMPLETIONS, asked, prompts)


@router.post("/chat/completions", openapi_extra=declares(body=CHAT.body, answer=schemas.ANSWER))
async def complete_chat(request: Request, state: Rollout) -> Response:
    """Answers from the tokens of the model's chat template. Fields of OpenAI, vLLM and SGLang that would change the
    answer and are not supported are refused by name; a null field is an absent one.
    """
    asked = CHAT.read(await read_model(request, CHAT.body))
    return await _respond(request, state, CHAT, asked, [render(asked, _tokenizer(state))])


async def _respond(
    request: Request, state: RolloutState, dialect: Dialect[Any], asked: Asked, prompts: Sequence[Prompt]
) -> Response:
    """Answer with JSON, or with events if the request asks for a stream. Raises InputError."""
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


def _model_name(state: RolloutState) -> str:
    return state.model_name


def _tokenizer(state: RolloutState) -> ChatTokenizer:
    if state.tokenizer is None:
        raise InputError("this server has no tokenizer", "send token ids to /generate")
    return state.tokenizer
