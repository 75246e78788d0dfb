"""Environments of an OpenEnv server: one WebSocket connection to its `/ws` is one episode.

Frames, as of OpenEnv 0.10 (package `openenv`, core/env_server/types.py): `{"type": "reset" | "step", "data": {…}}` is
answered by `{"type": "observation", "data": {"observation", "reward", "done", "metadata"?}}` or `{"type": "error",
"data": {"message", "code"}}`. OpenEnv servers do not share a notion of tasks, success or tools. Tasks are seeds for the
server's reset, or (split, index) if it takes those; an episode that is done with a reward above 0 counts as solved
unless `success` names a flag.

A seed is a hash of (split, index) whose lowest bit is the split, so no seed serves two splits. A server may ignore it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, WebSocketException

from services.env.backend import CALL_SECONDS, Call
from services.env.environments.tagged_answers import tagged_answer
from services.env.episode_types import (
    EVAL,
    MAX_REWARD,
    TRAIN,
    Demonstration,
    Info,
    Message,
    StepResult,
    check_task,
    user,
)
from shared import codec
from shared.bounds import MAX_OBJECTS
from shared.errors import Busy, DecodeError, GivenUp, NotFound, OpenEnvRefused, VolleyError
from shared.process import offload
from shared.text import well_formed
from shared.types import MAX_MESSAGE
from volley_sandbox.backends.remote import address as addresses
from volley_sandbox.backends.remote.paths import at_path
from volley_sandbox.backends.remote.site import CONNECT_S, RemoteContext, RemoteDescription, RemoteSite
from volley_sandbox.backends.submitted import KnownSplits

MAX_FRAME = 4 * 2**20
"""Bytes of one answer."""
_CLOSE_S, _FREED_S = 1.0, 0.5
_REFUSED = frozenset({"VALIDATION_ERROR", "INVALID_JSON"})
"""Error codes for an action that the server rejected."""
_HINT = 'answer with a JSON object: <answer>{"field": "value"}</answer>'

Path = Annotated[str, Field(max_length=200)]
NumTasks = Annotated[int, Field(ge=1, le=2**31)]


class OpenEnvConfig(BaseModel):
    """Settings that turn an OpenEnv into a conversation.

    Attributes:
        num_tasks: number of tasks of each split.
        reset_with: `seed` sends only a seed to the server's reset, `task` also `split` and `index` (OpenEnv's task
        API).
        instruction: a system message before the first observation.
        observation: path in the observation (`text`, `board.ascii`) of the user message; by default the whole
        observation as JSON. Text stays unchanged, any other value is JSON.
        action_field: the action is {action_field: the model's text}; by default, the JSON object in the model's
        `<answer>{…}</answer>`.
        success: path of a flag in the observation or its metadata that says whether the task is solved.
        execution_errors: handling of an exception in the server's step: `fail` ends the episode as a failure without a
        reward; `invalid_action` reports it to the model, for servers that answer bad actions this way.
        max_sessions: sessions at once, equal to the server's `max_concurrent_envs`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_tasks: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")], NumTasks] = {TRAIN: 1000, EVAL: 100}
    reset_with: Literal["seed", "task"] = "seed"
    instruction: Annotated[str, Field(max_length=20_000)] = ""
    observation: Path | None = None
    action_field: Path | None = None
    success: Path | None = None
    execution_errors: Literal["fail", "invalid_action"] = "fail"
    max_sessions: Annotated[int, Field(ge=1, le=4096)] = 64


class OpenEnvBackend(KnownSplits):
    """An OpenEnv server as an environment. `splits_of` is the number of tasks of each split."""

    is_remote, has_demonstration = True, False

    def __init__(self, context: RemoteContext, config: OpenEnvConfig) -> None:
        self.name, self.config, self.log = context.name, config, context.log
        self.splits_of = context.splits or config.num_tasks
        self.site = RemoteSite(context.address, context.access, config.max_sessions, context.log)

    async def describe(self) -> RemoteDescription:
        """Open one episode. Raises VolleyError if the server cannot be played."""
        episode = await self.reset(next(iter(self.splits_of)), 0, 0)
        await episode.close()
        return RemoteDescription("openenv", self.splits_of)

    async def task(self, split: str, index: int) -> str:
        check_task(self.name, self.splits_of, split, index)
        return f"{split}/{index}@{task_seed(split, index):08x}"

    async def reset(self, split: str, index: int, seed: int) -> OpenEnvEpisode:
        """Start an episode. `seed` is not sent, because a server takes one seed, which determines the task."""
        task = await self.task(split, index)
        asked: dict[str, Any] = {"seed": task_seed(split, index)}
        if self.config.reset_with == "task":
            asked |= {"split": split, "index": index}
        try:
            return await self._open(task, asked)
        except Busy:  # the server frees a session shortly after it has ended
            await asyncio.sleep(_FREED_S)
            return await self._open(task, asked)

    async def demonstration(self, split: str, index: int) -> Demonstration:
        raise NotFound(f"{self.name} has no demonstrations", "OpenEnv servers have none")

    def stuck_reason(self) -> str | None:
        return self.site.trouble

    async def _open(self, task: str, asked: Mapping[str, Any]) -> OpenEnvEpisode:
        """Open a session and reset it. Raises Busy if the server has no free session."""
        async with self.site.session():
            websocket = await self._connect()
            try:
                opened = _observation(await self.call(websocket, "reset", {"type": "reset", "data": asked}))
                if opened.done:
                    raise VolleyError(f"{self.name}: the episode was over after its reset", "a defect of the server")
            except BaseException:
                websocket.transport.abort()
                raise
            self.site.reached()
        first = user(self.text(opened.content))
        instruction = self.config.instruction
        opening = (Message(role="system", content=instruction), first) if instruction else (first,)
        return OpenEnvEpisode(self, websocket, task, opening)

    async def _connect(self) -> ClientConnection:
        """Connect to the server. Raises ServiceUnreachable. Redirects are not followed, because the socket is given."""
        address, tls = self.site.address, self.site.tls
        try:
            sock = await addresses.connect(address, CONNECT_S)
            return await open_websocket(
                f"{address.websocket}/ws",
                sock=sock,
                ssl=tls,
                server_hostname=address.host if tls else None,
                additional_headers=self.site.headers,
                user_agent_header=None,
                compression=None,
                proxy=None,
                open_timeout=self.site.deadline_s,
                ping_interval=None,
                max_size=MAX_FRAME,
                max_queue=4,
            )
        except (OSError, WebSocketException, ValueError) as error:
            raise self.site.unreachable("", error) from error

    async def call(self, websocket: ClientConnection, call: Call, frame: Mapping[str, Any]) -> dict[str, Any]:
        """Send a frame and return the data of its answer.

        Raises ServiceUnreachable (the connection broke), GivenUp, OpenEnvRefused, Busy, DecodeError.
        """
        began = time.perf_counter()
        try:
            return await self.site.within(call, self._asked(websocket, frame))
        except ConnectionClosed as error:
            raise self.site.unreachable(f"{call}: ", error) from error
        except (GivenUp, DecodeError) as error:
            self.log.append(f"{call}: {error.detail}")
            raise
        finally:
            CALL_SECONDS.labels(self.name, call).observe(time.perf_counter() - began)

    async def _asked(self, websocket: ClientConnection, frame: Mapping[str, Any]) -> dict[str, Any]:
        with suppress(ConnectionClosed):  # a server without a free session sends the reason and closes: read it next
            await websocket.send(orjson.dumps(frame).decode())
        raw = await websocket.recv(decode=False)
        what = f"the answer of {self.site.address}"
        answer = await offload.by_size(len(raw), lambda: codec.from_json(raw, what, MAX_OBJECTS, "replace"))
        kind = answer.get("type") if isinstance(answer, dict) else None
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict) or kind not in ("observation", "error"):
            raise DecodeError(
                f"{what} to {frame['type']} is not an OpenEnv frame", "check that the address is an OpenEnv server"
            )
        if kind == "error":
            code, server_text = str(data.get("code", "")), _complaint(data)
            if code == "CAPACITY_REACHED":
                raise Busy(
                    f"{self.site.address}: {server_text}", "set config.max_sessions to the server's number of sessions"
                )
            complaint = f"{self.site.address} answered {frame['type']} with {code}: {server_text}"
            raise OpenEnvRefused(complaint, code=code, server_message=server_text)
        return data

    def text(self, observation: Any) -> str:
        """User message for an observation. Raises VolleyError if it lacks the configured path."""
        path = self.config.observation
        if path:
            found = at_path(observation, path)
        elif isinstance(observation, dict):
            found = {key: value for key, value in observation.items() if key != "metadata"}
        else:
            found = observation
        if found is None and path:
            raise VolleyError(f"{self.name}: the observation has no {path!r}", "correct the path in config.observation")
        return (found if isinstance(found, str) else orjson.dumps(found).decode())[:MAX_MESSAGE]


class OpenEnvEpisode:
    """An episode on its own connection."""

    tools: tuple[Mapping[str, Any], ...] = ()
    database: None = None

    def __init__(
        self, backend: OpenEnvBackend, websocket: ClientConnection, task: str, opening: tuple[Message, ...]
    ) -> None:
        self.task, self.opening = task, opening
        self._backend, self._websocket, self._open = backend, websocket, True

    async def step(self, message: Message) -> StepResult:
        config = self._backend.config
        text = message["content"]
        action = {config.action_field: text} if config.action_field else _parsed(text)
        if action is None:
            return _rejected_action(f"There is no action in this answer: {_HINT}", "format")
        try:
            data = await self._backend.call(self._websocket, "step", {"type": "step", "data": action})
        except OpenEnvRefused as error:
            if error.code in _REFUSED or config.execution_errors == "invalid_action":
                return _rejected_action(error.server_message or error.code, "invalid_action")
            self._backend.log.append(f"step: {error.detail}")
            raise
        seen = _observation(data)
        messages = () if seen.done and seen.content is None else (user(self._backend.text(seen.content)),)
        flag = None
        if config.success:
            flag = at_path(seen.content, config.success)
            flag = at_path(seen.metadata, config.success) if flag is None else flag
        success = bool(flag) if config.success else seen.done and seen.reward > 0
        info = Info({"reward": seen.reward}, success, None, {"metadata": seen.metadata} if seen.metadata else {})
        return StepResult(messages, seen.reward, terminated=seen.done, truncated=False, info=info)

    async def close(self) -> None:
        """Close the connection, which ends the session on the server."""
        if self._open:
            self._open = False
            try:
                with suppress(OSError, WebSocketException):
                    async with asyncio.timeout(_CLOSE_S):
                        await self._websocket.close()
            finally:
                self._websocket.transport.abort()
                self._backend.site.leave()


@dataclass(frozen=True, slots=True)
class _Observation:
    content: Any
    reward: float
    done: bool
    metadata: Mapping[str, Any]


def _observation(data: Mapping[str, Any]) -> _Observation:
    """Parse an observation. Raises DecodeError."""
    reward, done, metadata = data.get("reward"), data.get("done", False), data.get("metadata")
    value = 0.0 if reward is None else reward
    if not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > MAX_REWARD:
        raise DecodeError(f"the reward {str(value)[:80]} is not a number within ±{MAX_REWARD:g}")
    if not isinstance(done, bool):
        raise DecodeError(f"done is {str(done)[:80]}, not true or false")
    return _Observation(data.get("observation"), float(value), done, metadata if isinstance(metadata, dict) else {})


def _complaint(data: Mapping[str, Any]) -> str:
    """Text of an error frame, with the fields that failed validation."""
    server_text, errors = str(data.get("message", "")), data.get("errors")
    wrong = [
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg', '')}"
        for error in (errors if isinstance(errors, list) else ())[:8]
        if isinstance(error, dict) and isinstance(error.get("loc"), list)
    ]
    return "; ".join([server_text, *wrong])[:1000]


def _rejected_action(text: str, error: Literal["format", "invalid_action"]) -> StepResult:
    return StepResult((user(text),), 0.0, False, False, Info({"reward": 0.0}, False, error))


def _parsed(text: str) -> dict[str, Any] | None:
    """JSON object in the last `<answer>`; None if there is none."""
    if (found := tagged_answer(text)) is None:
        return None
    try:
        value = codec.from_json(well_formed(found).encode(), "the action", errors="halves")
    except DecodeError:
        return None
    return value if isinstance(value, dict) else None


def task_seed(split: str, index: int) -> int:
    """Seed of a task, below 2**31, which every generator accepts; the lowest bit marks training tasks."""
    digest = hashlib.blake2b(f"{split}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 2 << 1 | (split == TRAIN)
