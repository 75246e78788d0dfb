"""SGLang's /generate."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.rollout.api import generate_body, schemas
from services.rollout.api.event_stream import EventStream
from services.rollout.api.generate_answer import AnswerGenerator, fail
from services.rollout.api.generation import ClientGone
from services.rollout.api.routes import Rollout
from shared import codec
from shared.process import offload
from shared.web.access import Role
from shared.web.edge import DirectRoute
from shared.web.http import read_body, respond
from shared.web.openapi import declares

router = APIRouter()
ROLES = {"POST /generate": Role.SERVICE}


@router.post("/generate", tags=["generate"], openapi_extra=declares(body=schemas.GENERATE, answer=schemas.GENERATED))
async def generate(request: Request, state: Rollout) -> Response:
    """Sample tokens after the given text or ids, of one prompt or of a batch. The answer has text, ids, weight versions
    and, unless `return_logprob` is false, log-probabilities; from `logprob_start_len` on also those of the prompt, at
    temperature 1. With `max_new_tokens` 0 nothing is sampled. With `stream` the answer comes as events, each with
    everything sampled so far.
    """
    arrays = request.headers.get("content-type", "").startswith(codec.MEDIA_TYPE)
    encode = state.tokenizer.encode if state.tokenizer else None
    raw = await read_body(request)
    read = partial(generate_body.read, raw, state.info, encode)
    body = await offload.tokenizing(read) if "text" in raw else read()
    generator = AnswerGenerator(state, body, arrays=arrays and not body.stream)
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
