"""HTTP to episodes and tasks. Task listing has the Open Reward Standard's names; episodes speak Gymnasium's
five-tuple.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from services.env.api.schemas import (
    Counted,
    CreateBody,
    Created,
    FinishBody,
    Named,
    Shown,
    SplitBody,
    StepBody,
    Stepped,
    TaskBody,
    created,
    read,
    stepped,
)
from services.env.api.state import state_of
from services.env.backend import Backend
from services.env.episodes import EpisodeRequest
from shared.web.access import Role
from shared.web.http import DirectRoute, respond
from shared.web.openapi import declares

router = APIRouter()
ROLES = {
    "POST /episodes": Role.SERVICE,
    "POST /episodes/{episode_id}/step": Role.SERVICE,
    "POST /episodes/{episode_id}/finish": Role.SERVICE,
    "DELETE /episodes/{episode_id}": Role.SERVICE,
    "GET /{env}/splits": Role.SERVICE,
    "GET /{env}/num_tasks": Role.SERVICE,
    "POST /{env}/num_tasks": Role.SERVICE,
    "GET /{env}/task": Role.SERVICE,
    "POST /{env}/task": Role.SERVICE,
    "POST /{env}/demonstration": Role.SERVICE,
}


EnvName = Annotated[str, Path(openapi_examples={"built in": {"value": "frozen_lake"}})]


@router.post(
    "/episodes",
    status_code=201,
    tags=["episodes"],
    openapi_extra=declares(body=CreateBody, answer=Created, statuses=(201,)),
)
async def create_episode(request: Request) -> Response:
    """Starts an episode of one task. Idempotent by `request_id` for as long as the episode lives."""
    body = await read(request, CreateBody)
    state = state_of(request)
    wanted = EpisodeRequest(body.env, body.split, body.index, body.seed, state.catalogue.get(body.env))
    await state.content.ensure(wanted.entry)
    slot = await state.episodes.create(body.request_id, wanted)
    return respond(request, created(slot, state.episodes.ttl_s), 201)


@router.post("/episodes/{episode_id}/step", tags=["episodes"], openapi_extra=declares(body=StepBody, answer=Stepped))
async def step_episode(request: Request, episode_id: str) -> Response:
    """Answers an assistant message with observation messages, reward, terminated, truncated, info. Idempotent by
    `request_id`.
    """
    body = await read(request, StepBody)
    result = await state_of(request).episodes.step(episode_id, body.request_id, body.message.as_message())
    return respond(request, stepped(result))


@router.post(
    "/episodes/{episode_id}/finish", tags=["episodes"], openapi_extra=declares(body=FinishBody, answer=Stepped)
)
async def finish_episode(request: Request, episode_id: str) -> Response:
    """Ends an episode that is not over and goes no further (its client has no room left): truncated, and worth what
    judges and reward services say of it as it stands. Idempotent by `request_id`.
    """
    body = await read(request, FinishBody)
    return respond(request, stepped(await state_of(request).episodes.finish(episode_id, body.request_id)))


@router.delete("/episodes/{episode_id}", status_code=204, tags=["episodes"])
async def delete_episode(request: Request, episode_id: str) -> Response:
    """Forgets an episode, also one that is forgotten already."""
    await state_of(request).episodes.delete(episode_id)
    return Response(status_code=204)


@router.get(
    "/{env}/splits", tags=["tasks"], openapi_extra=declares(answer={"type": "array", "items": {"type": "string"}})
)
async def list_splits(request: Request, env: EnvName) -> Response:
    """The names of the task sets."""
    return respond(request, list(await _backend(request, env).splits()))


async def count_tasks(request: Request, env: EnvName) -> Response:
    """How many tasks a split has."""
    body = await read(request, SplitBody)
    return respond(request, {"num_tasks": await _backend(request, env).num_tasks(body.split)})


async def show_task(request: Request, env: EnvName) -> Response:
    """The id of a task: split, index, and a digest of what the task is."""
    body = await read(request, TaskBody)
    return respond(request, {"task": await _backend(request, env).task(body.split, body.index)})


@router.post("/{env}/demonstration", tags=["tasks"], openapi_extra=declares(body=TaskBody, answer=Shown))
async def demonstrate(request: Request, env: EnvName) -> Response:
    """A conversation of one task to learn from, ending with the assistant's last message, and whether it solves the
    task; beside it the tools that its episodes have.
    """
    body = await read(request, TaskBody)
    shown = await _backend(request, env).demonstration(body.split, body.index)
    return respond(request, {"messages": list(shown.messages), "success": shown.success, "tools": list(shown.tools)})


for _path, _handler, _body, _answer in (
    ("num_tasks", count_tasks, SplitBody, Counted),
    ("task", show_task, TaskBody, Named),
):
    for _method, _extra in (
        ("GET", declares(query=_body, answer=_answer)),
        ("POST", declares(body=_body, answer=_answer)),
    ):
        _id = f"{_method.lower()}_{_path}"
        router.add_api_route(
            f"/{{env}}/{_path}", _handler, methods=[_method], tags=["tasks"], operation_id=_id, openapi_extra=_extra
        )


def _backend(request: Request, env: str) -> Backend:
    return state_of(request).catalogue.get(env).backend


def direct_routes() -> list[DirectRoute]:
    """The routes of every turn."""
    return [
        DirectRoute("POST", "/episodes/{episode_id}/step", step_episode),
        DirectRoute("POST", "/episodes", create_episode),
    ]
