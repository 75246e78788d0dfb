"""Routes of episodes and tasks.

Task listing uses the Open Reward Standard's names; episodes use Gymnasium's five-tuple.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from services.env.api.answers import (
    CreatedEpisode,
    DemonstrationAnswer,
    DemonstrationsAnswer,
    ProgramStateAnswer,
    StepAnswer,
    TaskCount,
    TaskName,
    created,
    shown,
    stepped,
)
from services.env.api.schemas import (
    CreateBody,
    FinishBody,
    RunBody,
    RunQuery,
    SplitBody,
    StepBody,
    TaskBody,
    TasksBody,
    read,
)
from services.env.api.state import state_of
from services.env.backend import EnvironmentBackend, ModelAddress, demonstrations
from services.env.episode_slots import EpisodeRequest
from shared.web.access import Role
from shared.web.edge import DirectRoute
from shared.web.http import respond
from shared.web.openapi import declares

router = APIRouter()
ROLES = {
    "POST /episodes": Role.SERVICE,
    "POST /episodes/{episode_id}/step": Role.SERVICE,
    "POST /episodes/{episode_id}/finish": Role.SERVICE,
    "POST /episodes/{episode_id}/run": Role.SERVICE,
    "GET /episodes/{episode_id}/run": Role.SERVICE,
    "DELETE /episodes/{episode_id}": Role.SERVICE,
    "GET /{env}/splits": Role.SERVICE,
    "GET /{env}/num_tasks": Role.SERVICE,
    "POST /{env}/num_tasks": Role.SERVICE,
    "GET /{env}/task": Role.SERVICE,
    "POST /{env}/task": Role.SERVICE,
    "POST /{env}/demonstration": Role.SERVICE,
    "POST /{env}/demonstrations": Role.SERVICE,
}


EnvName = Annotated[str, Path(openapi_examples={"built in": {"value": "frozen_lake"}})]


@router.post(
    "/episodes",
    status_code=201,
    tags=["episodes"],
    openapi_extra=declares(body=CreateBody, answer=CreatedEpisode, statuses=(201,)),
)
async def create_episode(request: Request) -> Response:
    """Start an episode of one task. Idempotent by `request_id` while the episode lives."""
    body = await read(request, CreateBody)
    state = state_of(request)
    entry = state.catalogue.get(body.env)
    wanted = EpisodeRequest(body.env, body.split, body.index, body.seed, entry, body.snapshot)
    await state.content.ensure(entry)
    slot = await state.episodes.create(body.request_id, wanted)
    return respond(request, created(slot, state.episodes.ttl_s), 201)


@router.post("/episodes/{episode_id}/step", tags=["episodes"], openapi_extra=declares(body=StepBody, answer=StepAnswer))
async def step_episode(request: Request, episode_id: str) -> Response:
    """Answer an assistant message with observation messages, reward, terminated, truncated and info.

    Idempotent by `request_id`.
    """
    body = await read(request, StepBody)
    result = await state_of(request).episodes.step(episode_id, body.request_id, body.message.as_message())
    return respond(request, stepped(result))


@router.post(
    "/episodes/{episode_id}/finish", tags=["episodes"], openapi_extra=declares(body=FinishBody, answer=StepAnswer)
)
async def finish_episode(request: Request, episode_id: str) -> Response:
    """End an episode early (another turn does not fit the client's context).

    The episode is truncated, and judges and reward services grade it as it stands. Idempotent by `request_id`.
    """
    body = await read(request, FinishBody)
    result = await state_of(request).episodes.finish(episode_id, body.request_id, body.output)
    return respond(request, stepped(result))


@router.post(
    "/episodes/{episode_id}/run",
    status_code=202,
    tags=["episodes"],
    openapi_extra=declares(body=RunBody, answer=ProgramStateAnswer, statuses=(202,)),
)
async def run_program(request: Request, episode_id: str) -> Response:
    """Start the program of an agent's episode, once. Idempotent by `request_id`."""
    body = await read(request, RunBody)
    address = ModelAddress(body.base_url, body.api_key, body.model)
    return respond(request, asdict(state_of(request).episodes.run(episode_id, body.request_id, address)), 202)


@router.get(
    "/episodes/{episode_id}/run", tags=["episodes"], openapi_extra=declares(query=RunQuery, answer=ProgramStateAnswer)
)
async def show_program(request: Request, episode_id: str) -> Response:
    """Show the state of the program, when it has ended or after `wait_s`."""
    query = await read(request, RunQuery)
    return respond(request, asdict(await state_of(request).episodes.run_state(episode_id, query.wait_s)))


@router.delete("/episodes/{episode_id}", status_code=204, tags=["episodes"])
async def delete_episode(request: Request, episode_id: str) -> Response:
    """Forget an episode. Idempotent."""
    await state_of(request).episodes.delete(episode_id)
    return Response(status_code=204)


@router.get(
    "/{env}/splits", tags=["tasks"], openapi_extra=declares(answer={"type": "array", "items": {"type": "string"}})
)
async def list_splits(request: Request, env: EnvName) -> Response:
    """List the names of the splits."""
    return respond(request, list(await _backend(request, env).splits()))


async def count_tasks(request: Request, env: EnvName) -> Response:
    """Count the tasks of a split."""
    body = await read(request, SplitBody)
    return respond(request, {"num_tasks": await _backend(request, env).num_tasks(body.split)})


async def show_task(request: Request, env: EnvName) -> Response:
    """Show the id of a task: split, index, and a digest of its content."""
    body = await read(request, TaskBody)
    return respond(request, {"task": await _backend(request, env).task(body.split, body.index)})


@router.post("/{env}/demonstration", tags=["tasks"], openapi_extra=declares(body=TaskBody, answer=DemonstrationAnswer))
async def demonstrate(request: Request, env: EnvName) -> Response:
    """Show a demonstration of one task, with its success and tools.

    The conversation ends with the assistant's last message.
    """
    body = await read(request, TaskBody)
    return respond(request, shown(await _backend(request, env).demonstration(body.split, body.index)))


@router.post(
    "/{env}/demonstrations", tags=["tasks"], openapi_extra=declares(body=TasksBody, answer=DemonstrationsAnswer)
)
async def demonstrate_all(request: Request, env: EnvName) -> Response:
    """Show demonstrations of several tasks, in the order of the indices; all or none."""
    body = await read(request, TasksBody)
    found = await demonstrations(_backend(request, env), body.split, body.indices)
    return respond(request, {"demonstrations": [shown(one) for one in found]})


for _path, _handler, _body, _answer in (
    ("num_tasks", count_tasks, SplitBody, TaskCount),
    ("task", show_task, TaskBody, TaskName),
):
    for _method, _extra in (
        ("GET", declares(query=_body, answer=_answer)),
        ("POST", declares(body=_body, answer=_answer)),
    ):
        _id = f"{_method.lower()}_{_path}"
        router.add_api_route(
            f"/{{env}}/{_path}", _handler, methods=[_method], tags=["tasks"], operation_id=_id, openapi_extra=_extra
        )


def _backend(request: Request, env: str) -> EnvironmentBackend:
    return state_of(request).catalogue.get(env).backend


def direct_routes() -> list[DirectRoute]:
    """Routes that are called in every episode."""
    return [
        DirectRoute("POST", "/episodes/{episode_id}/step", step_episode),
        DirectRoute("POST", "/episodes", create_episode),
    ]
