"""Environments of another Volley env service, with its tasks, demonstrations and tools.

Every episode has its own client, which is closed with the episode.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from services.env.episode_types import Demonstration, Message, StepResult, check_task
from shared.clients.env import EnvClient
from shared.errors import Busy, DecodeError, InputError, NotFound, RateLimited, SandboxFailed, Unavailable
from volley_sandbox.backends.remote.address import checked_socket
from volley_sandbox.backends.remote.site import RemoteContext, RemoteDescription, RemoteSite
from volley_sandbox.backends.submitted import KnownSplits
from volley_sandbox.sandbox import answers


class VolleyConfig(BaseModel):
    """`environment` is its name there; `max_sessions` bounds the episodes at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    environment: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,80}$")]
    max_sessions: Annotated[int, Field(ge=1, le=4096)] = 64


class VolleyBackend(KnownSplits):
    """An environment of another env service. `splits_of` is known from its validation."""

    is_remote = True

    def __init__(self, context: RemoteContext, config: VolleyConfig) -> None:
        self.name, self.config, self.log = context.name, config, context.log
        self.splits_of, self.has_demonstration = context.splits, context.has_demonstration
        self.site = RemoteSite(context.address, context.access, config.max_sessions, context.log)
        self._ca_file = context.access.ca_file

    async def describe(self) -> RemoteDescription:
        """Request splits and a demonstration. Raises VolleyError if the server is not an env service."""
        env = self.config.environment
        async with self.client() as client:
            names = await client.get(f"/{env}/splits", attempts=1)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names[:16]):
                raise DecodeError(f"{self.site.address}: the splits of {env} are not a list of names")
            splits = {name: await client.num_tasks(env, name) for name in names[:16]}
            try:
                await client.demonstration(env, names[0], 0)
            except NotFound:
                return RemoteDescription("volley", splits)
            return RemoteDescription("volley", splits, has_demonstration=True)

    async def task(self, split: str, index: int) -> str:
        check_task(self.name, self.splits_of, split, index)
        async with self.client() as client:
            asked = {"split": split, "index": index}
            answer = await client.post(f"/{self.config.environment}/task", asked)
        return self.read(lambda: answers.read_task(answer["task"]))

    async def reset(self, split: str, index: int, seed: int) -> VolleyEpisode:
        check_task(self.name, self.splits_of, split, index)
        asked = {"request_id": secrets.token_hex(8), "env": self.config.environment, "split": split, "index": index}
        async with self.site.session(), AsyncExitStack() as stack:
            client = await stack.enter_async_context(self.client())
            answer = await self.site.within("reset", client.post("/episodes", {**asked, "seed": seed}))
            opened = self.read(lambda: answers.read_opening(_opened(answer)))
            return VolleyEpisode(self, client, stack.pop_all(), str(answer["episode_id"]), opened)

    async def demonstration(self, split: str, index: int) -> Demonstration:
        check_task(self.name, self.splits_of, split, index)
        async with self.client() as client:
            asked = {"split": split, "index": index}
            answer = await client.post(f"/{self.config.environment}/demonstration", asked)
        return self.read(lambda: answers.read_demonstration({"tools": [], **answer}))

    def stuck_reason(self) -> str | None:
        return self.site.trouble

    @asynccontextmanager
    async def client(self) -> AsyncIterator[EnvClient]:
        """Open a client whose connection failures are recorded at the site. Raises VolleyError."""
        client = EnvClient(
            str(self.site.address),
            token=self.site.token,
            timeout_s=self.site.deadline_s,
            ca_file=self._ca_file,
            socket_factory=checked_socket,
        )
        async with client:
            with self.site.noting():
                yield client

    def read[T](self, make: Callable[[], T]) -> T:
        """Parse an answer with `make`. Raises DecodeError if it is invalid."""
        try:
            return make()
        except (SandboxFailed, KeyError, TypeError) as error:
            detail = error.detail if isinstance(error, SandboxFailed) else f"it lacks {error}"
            raise DecodeError(
                f"{self.site.address}: {detail}", "check that the address is a Volley env service"
            ) from error


class VolleyEpisode:
    """An episode of the other service."""

    database: None = None

    def __init__(
        self,
        backend: VolleyBackend,
        client: EnvClient,
        held: AsyncExitStack,
        episode_id: str,
        opened: answers.OpenedEpisode,
    ) -> None:
        self.task: str = opened.task
        self.opening: tuple[Message, ...] = opened.messages
        self.tools: Sequence[Mapping[str, Any]] = opened.tools
        self.seats, self.seat = opened.seats, opened.seat
        self._backend, self._client, self._held, self._id = backend, client, held, episode_id
        self._n_steps, self._open = 0, True

    async def step(self, message: Message) -> StepResult:
        site, self._n_steps = self._backend.site, self._n_steps + 1
        body = {"request_id": str(self._n_steps), "message": message}
        try:
            with site.noting():
                answer = await site.within("step", self._client.post(f"/episodes/{self._id}/step", body))
        except RateLimited as error:
            self._n_steps -= 1
            raise Busy(f"{site.address}: {error.detail}", retry_after_s=error.retry_after_s) from error
        except InputError as error:  # the service restarted and does not know the episode
            raise Unavailable(f"{site.address} lost the episode: {error.detail}") from error
        return self._backend.read(lambda: answers.read_step(_parted(answer)))

    async def close(self) -> None:
        if self._open:
            self._open = False
            try:
                await self._backend.site.forget(self._client.delete_episode(self._id))
            finally:
                await self._held.aclose()
                self._backend.site.leave()


def _opened(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Opening of an episode, with its seats if it has any."""
    info = answer.get("info") or {}
    seats = {key: info[key] for key in ("seats", "seat")} if info.get("seats") else {}
    return {**{key: answer[key] for key in ("task", "messages", "tools")}, **seats}


def _parted(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A step's answer, with the environment's additions to `info` in `extra`."""
    known = ("reward_components", "success", "error")
    info = answer["info"]
    extra = {key: value for key, value in info.items() if key not in known}
    wanted = {key: answer[key] for key in ("messages", "reward", "terminated", "truncated")}
    return {**wanted, "info": {**{key: info[key] for key in known}, "extra": extra}}
