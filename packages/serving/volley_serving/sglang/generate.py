"""SGLang's /generate with everything that its clients send, in place of the core's (part `generate_route`)."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.rollout.api import generate as core
from services.rollout.api.generation import ClientGone
from services.rollout.api.routes import Rollout
from shared.process import offload
from shared.web.edge import DirectRoute
from shared.web.http import read_body, respond
from shared.web.openapi import declares
from volley_serving.event_stream import EventStream
from volley_serving.sglang import generate_body, schemas
from volley_serving.sglang.generate_answer import AnswerGenerator, fail

router = APIRouter()


@router.post("/generate", tags=["generate"], openapi_extra=declares(body=schemas.GENERATE, answer=schemas.GENERATED))
async def generate(request: Request, state: Rollout) -> Response:
    """Sample tokens after the given text or ids, of one prompt or of a batch. The answer has text, ids, weight versions
    and, unless `return_logprob` is false, log-probabilities; from `logprob_start_len` on also those of the prompt, at
    temperature 1. With `max_new_tokens` 0 nothing is sampled. With `stream` the answer comes as events, each with
    everything sampled so far.
    """
    raw = await read_body(request)
    if core.beyond_core(request, raw) is None:
        return await core.answer(request, state, raw)
    encode = state.tokenizer.encode if state.tokenizer else None
    read = partial(generate_body.read, raw, state.info, encode)
    body = await offload.tokenizing(read) if "text" in raw else read()
    generator = AnswerGenerator(state, body, arrays=core.is_packed(request) and not body.stream)
    if body.stream:
        return EventStream(generator.stream, fail)
    try:
        return respond(request, await generator.answer(request.receive))
    except ClientGone:
        return Response(status_code=499)


async def _answer(request: Request) -> Response:
    return await generate(request, request.app.state.rollout)


def direct_routes() -> list[DirectRoute]:
    """The route of every turn, which FastAPI would slow down."""
    return [DirectRoute("POST", "/generate", _answer)]
