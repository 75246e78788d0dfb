"""OpenAI's routes on the same engine, for clients that send text (shared.dialects)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.rollout.api import schemas, validation
from services.rollout.api.generation import ClientGone
from services.rollout.api.routes import Rollout, RolloutState
from services.rollout.engines.base import GenerateResult, SamplingParams
from shared.dialects import chat, completions
from shared.dialects.decoding import answered
from shared.dialects.events import AnswerStream, encode_finished
from shared.dialects.prompts import Prompt, render
from shared.dialects.records import Answered, Asked, Head, Sampled, Usage, usage_of
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
_GONE = Response(status_code=499)


@router.get("/models", openapi_extra=declares(answer=schemas.MODELS))
async def models(request: Request, state: Rollout) -> Response:
    model = {
        "id": _model_name(state),
        "object": "model",
        "owned_by": "volley",
        "max_model_len": state.info.context_length,
    }
    return respond(request, {"object": "list", "data": [model]})


@router.post("/completions", openapi_extra=declares(body=completions.CompletionBody, answer=schemas.ANSWER))
async def complete_text(request: Request, state: Rollout) -> Response:
    tokenizer, asked = _tokenizer(state), completions.read(await read_model(request, completions.CompletionBody))
    if asked.stream:
        raise InputError("stream is not supported", "leave it out: the answer comes whole")
    prompts = [Prompt(tokenizer.encode(one) if isinstance(one, str) else [*one]) for one in asked.prompts]
    results = await _sample(request, state, asked, prompts, default_new=completions.DEFAULT_TOKENS)
    if results is None:
        return _GONE
    answers, usage = _answers(tokenizer, asked, prompts, results)
    body = completions.write(asked, _head(state), answers, usage, tokenizer)
    return respond(request, body | {"prompt_token_ids": prompts[0].ids})


@router.post("/chat/completions", openapi_extra=declares(body=chat.ChatBody, answer=schemas.ANSWER))
async def complete_chat(request: Request, state: Rollout) -> Response:
    """Answers from the tokens of the model's chat template. Fields of OpenAI, vLLM and SGLang that would change the
    answer and are not supported are refused by name; a null field is an absent one.
    """
    tokenizer, asked = _tokenizer(state), chat.read(await read_model(request, chat.ChatBody))
    if asked.top_logprobs:
        raise InputError("top_logprobs is not supported", "leave out top_logprobs")
    prompts = [render(asked, tokenizer)]
    results = await _sample(request, state, asked, prompts, default_new=None)
    if results is None:
        return _GONE
    answers, usage = _answers(tokenizer, asked, prompts, results)
    if asked.stream:
        return _streamed(chat.ChatStream(asked, _head(state), tokenizer), answers, usage)
    body = chat.write(asked, _head(state), answers, usage, tokenizer)
    return respond(request, body | {"prompt_token_ids": prompts[0].ids})


def _streamed(stream: AnswerStream, answers: Sequence[Answered], usage: Usage) -> Response:
    return Response(encode_finished(stream, answers, usage), media_type="text/event-stream")


async def _sample(
    request: Request, state: RolloutState, asked: Asked, prompts: Sequence[Prompt], default_new: int | None
) -> list[GenerateResult] | None:
    """Return n results for each prompt; None if the client has disconnected. Raises InputError."""
    requests = list[validation.GenerateRequest]()
    for prompt in prompts:
        ids = validation.check_ids(np.array(prompt.ids, np.int64), state.info.vocab_size)
        room = max(1, validation.room(state.info) - len(ids))
        limit = asked.sampling.max_tokens or min(default_new or room, room)
        requests += [validation.build(ids, _sampling(asked, limit, state, i), None, state.info) for i in range(asked.n)]
    try:
        return await state.generation.run(requests, request.receive)
    except ClientGone:
        return None


def _sampling(asked: Asked, limit: int, state: RolloutState, i: int) -> SamplingParams:
    wanted = asked.sampling
    ends = () if wanted.ignore_eos else tuple(sorted(_tokenizer(state).end_ids))
    return SamplingParams(
        max_new_tokens=limit,
        temperature=validation.computable(wanted.temperature),
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        stop_token_ids=(*ends, *validation.check_stops([*wanted.stop_token_ids], state.info.vocab_size)),
        ignore_eos=wanted.ignore_eos,
        sampling_seed=None if wanted.seed is None else (wanted.seed + i) % (1 << 64),
    )


def _answers(
    tokenizer: ChatTokenizer, asked: Asked, prompts: Sequence[Prompt], results: Sequence[GenerateResult]
) -> tuple[list[Answered], Usage]:
    openings = [prompt.opened for prompt in prompts for _ in range(asked.n)]
    answers = [
        answered(tokenizer, asked, _sampled(result), opened) for result, opened in zip(results, openings, strict=True)
    ]
    cached = sum(result.cached_tokens for result in results[:: asked.n])
    return answers, usage_of([len(prompt.ids) for prompt in prompts], answers, cached)


def _sampled(result: GenerateResult) -> Sampled:
    return Sampled(result.output_ids, result.logprobs, result.finish.type, result.finish.matched, result.versions)


def _head(state: RolloutState) -> Head:
    return Head(_model_name(state), state.updates.current)


def _model_name(state: RolloutState) -> str:
    return state.model_name


def _tokenizer(state: RolloutState) -> ChatTokenizer:
    if state.tokenizer is None:
        raise InputError("this server has no tokenizer", "send token ids to /generate")
    return state.tokenizer
