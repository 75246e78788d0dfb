"""Routes of the recorder: the model as agents call it, and their sessions.

The model's routes check the key of a session themselves; those of sessions need a service's token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from shared.errors import Conflict, InputError, NotFound
from shared.process import offload
from shared.run.mixture import base_name
from shared.types import MAX_MESSAGE
from shared.web.access import Role
from shared.web.http import read_body, read_model, respond, validated
from shared.web.openapi import declares
from volley_agents.sessions.calls import CallSampler
from volley_agents.sessions.messages import digest_of
from volley_agents.sessions.records import CallRequest, SessionResult
from volley_agents.sessions.serving import CallResponse, Exchange
from volley_agents.sessions.session import AgentSession
from volley_agents.sessions.sessions import Sessions
from volley_agents.sessions.views import claimed_view, session_view
from volley_serving.dialects import dialect as dialects
from volley_serving.dialects import messages
from volley_serving.dialects.dialect import Dialect
from volley_serving.dialects.prompts import render

router = APIRouter(prefix="/v1", tags=["sessions"])
ROLES = {
    "POST /v1/chat/completions": Role.ANYONE,
    "POST /v1/completions": Role.ANYONE,
    "POST /v1/responses": Role.ANYONE,
    "POST /v1/messages": Role.ANYONE,
    "POST /v1/messages/count_tokens": Role.ANYONE,
    "GET /v1/models": Role.ANYONE,
    "POST /v1/sessions": Role.SERVICE,
    "GET /v1/sessions/{id}": Role.VIEWER,
    "POST /v1/sessions/{id}/end": Role.SERVICE,
    "POST /v1/sessions/{id}/reward": Role.SERVICE,
}
_MOST_KEY = 255
_ANSWER: Mapping[str, Any] = {"type": "object"}


class SessionsState:
    """State of the routes, in `app.state.sessions`.

    `environments` returns the names of the run's environments; none while they are unknown.
    """

    def __init__(self, sessions: Sessions, sampler: CallSampler, base_url: str) -> None:
        self.sessions, self.sampler, self.base_url = sessions, sampler, base_url
        self.environments: Callable[[], Collection[str]] = tuple


async def _state(request: Request) -> SessionsState:
    return request.app.state.sessions


Here = Annotated[SessionsState, Depends(_state)]


class ClaimBody(BaseModel):
    """`env` limits the claim to one environment, with its version or without.

    A repeated `request_id` gets the same session.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"request_id": "worker-7/1", "wait_s": 20}]}
    )
    request_id: Annotated[str, Field(min_length=1, max_length=200)]
    env: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    wait_s: Annotated[float, Field(ge=0, le=20, allow_inf_nan=False)] = 0.0


class EndBody(BaseModel):
    """`output` is judged, if the environment judges. `failed` says why the agent failed: then there is no reward."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [{"output": "42"}]})
    output: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    failed: Annotated[str, Field(min_length=1, max_length=2000)] | None = None


class RewardBody(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"reward": 1.0, "success": True}]}
    )
    reward: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
    success: bool = False
    components: Annotated[
        dict[Annotated[str, Field(max_length=100)], Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]],
        Field(max_length=64),
    ] = {}


@router.post("/chat/completions", openapi_extra=declares(body=dialects.CHAT.body, answer=_ANSWER))
async def complete_chat(request: Request, state: Here) -> Response:
    """Answer a call of an agent, and record it. Sampling is the run's, which the header x-volley-sampling names."""
    return await _call(request, state, dialects.CHAT)


@router.post("/completions", openapi_extra=declares(body=dialects.COMPLETIONS.body, answer=_ANSWER))
async def complete_text(request: Request, state: Here) -> Response:
    """Continue one text or list of token ids, and record it. A prompt that begins with the tokens of a recorded turn
    continues that turn.
    """
    return await _call(request, state, dialects.COMPLETIONS)


@router.post("/responses", openapi_extra=declares(body=dialects.RESPONSES.body, answer=_ANSWER))
async def respond_to(request: Request, state: Here) -> Response:
    """The same in the dialect of OpenAI's Responses API; nothing is kept for `previous_response_id`."""
    return await _call(request, state, dialects.RESPONSES)


@router.post("/messages", openapi_extra=declares(body=dialects.MESSAGES.body, answer=_ANSWER))
async def create_message(request: Request, state: Here) -> Response:
    """The same in the dialect of Anthropic's Messages API."""
    return await _call(request, state, dialects.MESSAGES)


@router.post("/messages/count_tokens", openapi_extra=declares(body=messages.CountBody, answer=_ANSWER))
async def count_tokens(request: Request, state: Here) -> Response:
    """Count the tokens of a prompt that begins a sequence; nothing is recorded."""
    await state.sessions.by_key(_key(request))
    body = await read_model(request, messages.CountBody)
    prompt = await offload.tokenizing(lambda: render(messages.read(body), state.sampler.tokenizer))
    return respond(request, {"input_tokens": len(prompt.ids)})


async def _call(request: Request, state: SessionsState, dialect: Dialect[Any]) -> Response:
    session = await state.sessions.by_key(_key(request))
    raw = await read_body(request)
    asked = await state.sampler.read(session, lambda: dialect.read(validated(dialect.body, raw, strict=True)))
    call = _identity(request, digest_of(request.url.path, raw))
    exchange = Exchange(session, dialect, asked, state.sampler.tokenizer)
    return CallResponse(
        exchange, lambda: session.call(call, lambda number: state.sampler.sample(session, asked, number))
    )


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _identity(request: Request, body: bytes) -> CallRequest:
    """Identity of a call. Raises InputError for an idempotency key that is too long."""
    key, retry = request.headers.get("idempotency-key"), request.headers.get("x-stainless-retry-count", "0")
    if key is not None and not 0 < len(key) <= _MOST_KEY:
        raise InputError(f"Idempotency-Key has {len(key)} characters, but 1 to {_MOST_KEY} are allowed")
    return CallRequest(body, key, retry.isdigit() and int(retry) > 0)


@router.get("/models", openapi_extra=declares(answer=_ANSWER))
async def list_models(request: Request, state: Here) -> Response:
    """List the one model that a session's key may call."""
    await state.sessions.by_key(_key(request))
    model = {"id": state.sampler.model, "object": "model", "created": 0, "owned_by": "volley"}
    return respond(request, {"object": "list", "data": [model]})


@router.post(
    "/sessions",
    status_code=201,
    responses={204: {"description": "No task waits"}},
    openapi_extra=declares(body=ClaimBody, answer=_ANSWER, statuses=(201,)),
)
async def claim_session(request: Request, state: Here) -> Response:
    """Claim the next task that waits for an external agent; 204 if there is none within `wait_s`. 404 if the run does
    not play the environment.
    """
    body = await read_model(request, ClaimBody)
    if body.env is not None and (known := state.environments()):
        _check_environment(body.env, known)
    session = await state.sessions.claim(body.env, body.request_id, body.wait_s)
    if session is None:
        return Response(status_code=204)
    key = state.sessions.key_of(session)
    return respond(request, claimed_view(session, key, state.base_url, state.sampler.model), 201)


def _check_environment(env: str, known: Collection[str]) -> None:
    """Raise NotFound if no environment of the run has this name, with its version or without."""
    if env not in {*known, *map(base_name, known)}:
        raise NotFound(
            f"environment {env!r} is not played in this run", f"its environments: {', '.join(sorted(known))}"
        )


@router.get("/sessions/{id}", openapi_extra=declares(answer=_ANSWER))
async def show_session(request: Request, state: Here, id: str) -> Response:
    """Show a session: its state, its calls, and its sequences with their numbers of tokens."""
    session = await state.sessions.find(id)
    await session.load()
    return respond(request, session_view(session))


@router.post("/sessions/{id}/end", openapi_extra=declares(body=EndBody, answer=_ANSWER))
async def end_session(request: Request, state: Here, id: str) -> Response:
    """End a session; its key is refused from then on. Repeating it changes nothing."""
    body = await read_model(request, EndBody)
    session = await state.sessions.find(id)
    if body.failed is None:
        await session.end(body.output)
    elif session.state == "running":
        await session.void(f"the agent failed: {body.failed}")
    elif session.state != "void":
        raise Conflict(f"session {id} is {session.state} and can no longer fail")
    return await _shown(request, session)


@router.post("/sessions/{id}/reward", openapi_extra=declares(body=RewardBody, answer=_ANSWER))
async def reward_session(request: Request, state: Here, id: str) -> Response:
    """Give an ended session its reward, if its environment does not judge. Repeating it changes nothing."""
    body = await read_model(request, RewardBody)
    session = await state.sessions.find(id)
    if session.record.judged:
        raise Conflict(
            f"environment {session.record.env} scores its sessions itself", "remove the reward from the request"
        )
    await session.give_reward(SessionResult(body.reward, body.success, body.components))
    return await _shown(request, session)


async def _shown(request: Request, session: AgentSession) -> Response:
    await session.load()
    return respond(request, session_view(session))
