"""OpenEnv server for Volley's environments, at `/openenv/{env}`.

One WebSocket is one session, which plays one episode at a time with the frames of OpenEnv 0.10 (see
volley_sandbox/backends/remote/openenv.py). Invariants: its episodes have the bounds and lifetime of all episodes; an
episode ends with its session; a wrong frame is answered with an error frame, and the session continues.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from services.env.api.answers import stepped
from services.env.api.routes import EnvName
from services.env.api.schemas import Index, Name
from services.env.api.state import EnvState, state_of
from services.env.episode_slots import EpisodeRequest, EpisodeSlot
from services.env.episode_types import TRAIN, Message, StepResult
from shared import codec
from shared.errors import InputError, NotFound, RateLimited, UnknownFrame, VolleyError
from shared.process import offload
from shared.types import MAX_MESSAGE
from shared.web.access import Role
from shared.web.http import respond, validated
from shared.web.openapi import declares
from shared.web.routes import ServiceRoutes

router = APIRouter(tags=["openenv"])
ROLES = {
    "GET /openenv/{env}/health": Role.ANYONE,
    "GET /openenv/{env}/metadata": Role.VIEWER,
    "GET /openenv/{env}/schema": Role.VIEWER,
    "WS /openenv/{env}/ws": Role.SERVICE,
}
MAX_SEED = 2**63


class ResetData(BaseModel):
    """Data of a `reset` frame. Other fields are ignored, as OpenEnv does.

    Without `index`, `seed` chooses the task; without both, the task is random.
    """

    model_config = ConfigDict(frozen=True)

    split: Name = TRAIN
    index: Index | None = None
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED)] | None = None
    episode_id: Annotated[str, Field(max_length=255)] | None = None


class OpenEnvAction(BaseModel):
    """The assistant's message; `tool_calls` in OpenAI's shape. OpenEnv clients may add `metadata`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    message: Annotated[str, Field(max_length=MAX_MESSAGE)]
    tool_calls: Annotated[list[JsonValue], Field(max_length=64)] | None = None
    metadata: dict[str, JsonValue] | None = None

    def as_message(self) -> Message:
        message = Message(role="assistant", content=self.message)
        return {**message, "tool_calls": self.tool_calls} if self.tool_calls else message


class OpenEnvObservation(BaseModel):
    """The messages that the assistant answers next, and their text joined."""

    text: str
    messages: list[dict[str, JsonValue]]
    task: str
    tools: list[dict[str, JsonValue]] = []


class OpenEnvState(BaseModel):
    episode_id: str | None
    step_count: int
    task: str | None


class SchemasShown(BaseModel):
    action: dict[str, Any]
    observation: dict[str, Any]
    state: dict[str, Any]


class MetadataShown(BaseModel):
    name: str
    description: str


class HealthShown(BaseModel):
    status: Literal["healthy"]


@router.get("/openenv/{env}/health", openapi_extra=declares(answer=HealthShown))
async def show_health(request: Request, env: EnvName) -> Response:
    """Report healthy if the environment exists, else 404."""
    state_of(request).catalogue.get(env)
    return respond(request, {"status": "healthy"})


@router.get("/openenv/{env}/metadata", openapi_extra=declares(answer=MetadataShown))
async def show_metadata(request: Request, env: EnvName) -> Response:
    """Show the environment's name."""
    entry = state_of(request).catalogue.get(env)
    return respond(request, {"name": entry.name, "description": f"{entry.name}, played through Volley"})


@router.get("/openenv/{env}/schema", openapi_extra=declares(answer=SchemasShown))
async def show_schema(request: Request, env: EnvName) -> Response:
    """Show the JSON schemas of actions, observations and states, which all environments share."""
    state_of(request).catalogue.get(env)
    models = {"action": OpenEnvAction, "observation": OpenEnvObservation, "state": OpenEnvState}
    return respond(request, {name: model.model_json_schema() for name, model in models.items()})


@router.websocket("/openenv/{env}/ws")
async def play(websocket: WebSocket, env: str) -> None:
    """Serve one session: frames `{"type": "reset" | "step" | "state" | "close", "data": {…}}`, each answered by one."""
    session = OpenEnvSession(websocket.app.state.env, env)
    max_objects: int = websocket.app.state.max_objects
    loop = asyncio.get_running_loop()
    await websocket.accept()
    try:
        async with asyncio.timeout(session.idle_s) as idle:
            rearm_at = loop.time() + session.idle_s / 8
            while True:
                raw = (await websocket.receive_text()).encode("utf-8", "surrogatepass")
                answer = await session.answer(raw, max_objects)
                if answer is None:
                    break
                await websocket.send_text(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY).decode())
                if (now := loop.time()) > rearm_at:  # rarely, because timers cost more than steps
                    rearm_at = now + session.idle_s / 8
                    idle.reschedule(now + session.idle_s)
        await websocket.close()
    except (WebSocketDisconnect, KeyError, TimeoutError):
        return  # disconnected, sent binary, idle, or not reading: the server closes the socket
    finally:
        await session.end()


class OpenEnvSession:
    """One session and its episode, if any."""

    def __init__(self, state: EnvState, env: str) -> None:
        self._state, self._env = state, env
        self._id, self._numbers = secrets.token_hex(8), itertools.count()
        self._slot: EpisodeSlot | None = None
        self._episode_id: str | None = None
        self._n_steps = 0

    @property
    def idle_s(self) -> float:
        """Approximate idle timeout of a session, in seconds: the idle life of its episode."""
        return self._state.episodes.ttl_s

    async def answer(self, raw: bytes, max_objects: int) -> dict[str, Any] | None:
        """Answer one frame; None ends the session."""
        try:
            frame = await offload.by_size(len(raw), lambda: codec.from_json(raw, "the frame", max_objects, "halves"))
            return await self._answered(frame)
        except VolleyError as error:
            return {"type": "error", "data": {"message": str(error), "code": _code(error)}}

    async def end(self) -> None:
        """Forget the episode."""
        slot, self._slot = self._slot, None
        if slot is not None:
            await self._state.episodes.delete(slot.id)

    async def _answered(self, frame: Any) -> dict[str, Any] | None:
        """Raises VolleyError."""
        kind = frame.get("type") if isinstance(frame, dict) else None
        data = frame.get("data", {}) if isinstance(frame, dict) else None
        if not isinstance(data, dict):
            raise InputError('a frame is {"type": "reset" | "step" | "state" | "close", "data": {…}}')
        if kind == "step":
            return await self._step(validated(OpenEnvAction, data, strict=True))
        if kind == "reset":
            return await self._reset(validated(ResetData, data, strict=True))
        if kind == "state":
            task = self._slot.task if self._slot else None
            return {"type": "state", "data": _state(self._episode_id, self._n_steps, task)}
        if kind == "close":
            return None
        raise UnknownFrame(f"there is no frame of type {str(kind)[:80]!r}", "use one of: reset, step, state, close")

    async def _reset(self, data: ResetData) -> dict[str, Any]:
        """Raises VolleyError."""
        await self.end()
        entry = self._state.catalogue.get(self._env)
        seed, index = data.seed, data.index
        if index is None:
            seed = secrets.randbelow(MAX_SEED) if seed is None else seed
            index = seed % await entry.backend.num_tasks(data.split)
        wanted = EpisodeRequest(entry.name, data.split, index, seed, entry)
        slot = await self._state.episodes.create(f"openenv-{self._id}-{next(self._numbers)}", wanted)
        self._slot, self._n_steps, self._episode_id = slot, 0, data.episode_id or slot.id
        info = {"split": data.split, "index": index, "seed": slot.seed, "episode_id": slot.id}
        return _frame(slot, slot.opening, None, False, info, first=True)

    async def _step(self, action: OpenEnvAction) -> dict[str, Any]:
        """Raises VolleyError."""
        slot = self._slot
        if slot is None:
            raise NotFound("there is no episode in this session", 'send {"type": "reset", "data": {}} first')
        result = await self._state.episodes.step(slot.id, str(next(self._numbers)), action.as_message())
        self._n_steps += 1
        return _stepped(slot, result)


def _code(error: VolleyError) -> str:
    """OpenEnv's name for an error (WSErrorCode)."""
    if isinstance(error, RateLimited):
        return "CAPACITY_REACHED"
    if isinstance(error, UnknownFrame):
        return "UNKNOWN_TYPE"
    return "VALIDATION_ERROR" if isinstance(error, InputError) else "EXECUTION_ERROR"


def _stepped(slot: EpisodeSlot, result: StepResult) -> dict[str, Any]:
    answer = stepped(result)
    info = {**answer["info"], "terminated": result.terminated, "truncated": result.truncated}
    return _frame(slot, result.messages, answer["reward"], result.over, info)


def _frame(
    slot: EpisodeSlot,
    messages: tuple[Message, ...],
    reward: float | None,
    done: bool,
    metadata: Mapping[str, Any],
    first: bool = False,
) -> dict[str, Any]:
    observation: dict[str, Any] = {
        "text": "\n\n".join(message["content"] for message in messages),
        "messages": list(messages),
        "task": slot.task,
    }
    if first:
        observation["tools"] = list(slot.tools)
    data = {"observation": observation, "reward": reward, "done": done, "metadata": metadata}
    return {"type": "observation", "data": data}


def _state(episode_id: str | None, n_steps: int, task: str | None) -> dict[str, Any]:
    return OpenEnvState(episode_id=episode_id, step_count=n_steps, task=task).model_dump()


ROUTES = ServiceRoutes(router, ROLES)
