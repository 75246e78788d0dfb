"""Protocols through which the service calls an environment's code: asynchronous, each call with a deadline.

Calls raise VolleyErrors only. Invariants: the event loop never runs environment code; an environment can delay the
others but not fail them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Protocol, TypeGuard, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from services.env.episode_types import Demonstration, Info, Message, StepResult
from shared.errors import InputError, VolleyError
from shared.process import telemetry

MAX_AGENT_S = 24 * 3600.0
"""Longest time that an environment may give its agent, in seconds."""
_SHOWN_AT_ONCE = 4

type Call = Literal["load", "list", "reset", "step", "demonstrate"]

CALL_SECONDS = telemetry.Histogram(
    "volley_env_call_seconds", "Duration of a call into environment code", ["env", "call"], registry=telemetry.REGISTRY
)


@lru_cache(maxsize=1024)
def call_seconds(env: str, call: Call) -> telemetry.Histogram:
    """Histogram of one environment's calls, cached because steps are frequent."""
    return CALL_SECONDS.labels(env, call)


class LiveEpisode(Protocol):
    """One conversation in progress.

    `task` is a readable id of its task, `opening` the messages that the assistant answers first, `tools` JSON schemas
    in OpenAI's shape, and `database` the task's database in the SQL tool's format.
    """

    @property
    def task(self) -> str: ...

    @property
    def opening(self) -> tuple[Message, ...]: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def database(self) -> str | None: ...

    async def step(self, message: Message) -> StepResult:
        """Answer one assistant message.

        Raises Busy (repeat this request) and Conflict (repeat the request before it), neither of which harms the
        episode; GivenUp; VolleyError for a defect.
        """
        ...

    async def close(self) -> None:
        """Free what the episode holds; it is not stepped again. Idempotent; never raises."""
        ...


@runtime_checkable
class GradableEpisode(Protocol):
    """An episode that can be graded before its end, when its client stops."""

    async def finish(self) -> StepResult:
        """End the episode as truncated, with the reward of its present state. Raises what `LiveEpisode.step` does."""
        ...


@runtime_checkable
class RestorableEpisode(LiveEpisode, Protocol):
    """An episode whose environment stores its state: `info.snapshot` of a step, if `restorable`."""

    @property
    def restorable(self) -> bool: ...

    async def restore(self, snapshot: Any) -> None:
        """Go on from a snapshot, before the first step. Raises VolleyError for a defect."""
        ...


def is_restorable(episode: LiveEpisode | None) -> TypeGuard[RestorableEpisode]:
    """Return True if a new episode can go on from the snapshots of this one."""
    return isinstance(episode, RestorableEpisode) and episode.restorable


async def restore(env: str, episode: LiveEpisode, snapshot: Any) -> None:
    """Let a new episode go on from a snapshot; one that fails is closed. Raises InputError, VolleyError."""
    try:
        if not is_restorable(episode):
            raise InputError(f"snapshot: episodes of {env} cannot be restored", "leave it out")
        await episode.restore(snapshot)
    except BaseException:
        await asyncio.shield(episode.close())
        raise


@runtime_checkable
class SeatedEpisode(Protocol):
    """A game of several players: `seats` are their names, empty for one player; `seat` answers the opening.

    A step's `info.seat` names the seat that answers next. The last one's `info.rewards` has the reward of each.
    """

    @property
    def seats(self) -> Sequence[str]: ...

    @property
    def seat(self) -> str: ...


class AgentSpec(BaseModel):
    """How episodes of an agent are played.

    Attributes:
        kind: `program` is started by this service; `external` runs elsewhere.
        timeout_s: seconds after which the program is ended; it is judged as it stands.
        exit_codes: codes that are a normal end.
        judged: True if the environment gives the reward.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["program", "external"]
    timeout_s: Annotated[float, Field(gt=0, le=MAX_AGENT_S)]
    exit_codes: tuple[Annotated[int, Field(ge=0, le=255)], ...]
    judged: bool


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """Address of the model for an agent, and the key of its session."""

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True, slots=True)
class ProgramState:
    """State of an agent's program.

    `exit_code` is None while it runs, and if it was killed; `detail` says how it ended if not by itself; `output` is
    the end of its output.
    """

    state: Literal["running", "exited", "failed"]
    exit_code: int | None = None
    detail: str = ""
    output: str = ""


@runtime_checkable
class AgentPlayed(Protocol):
    """An episode played by an agent and judged by `finish`."""

    @property
    def agent(self) -> AgentSpec: ...

    @property
    def played(self) -> tuple[Message, ...]: ...

    def begin(self, request_id: str, address: ModelAddress) -> bool: ...

    async def play(self) -> None: ...

    async def state(self, wait_s: float) -> ProgramState: ...

    def set_output(self, output: str) -> None:
        """Store the final output of an external agent, before `finish`."""
        ...

    async def finish(self) -> StepResult: ...


async def finish_early(episode: LiveEpisode) -> StepResult:
    """End an episode early: truncated, and without a reward unless it is a `GradableEpisode`."""
    if isinstance(episode, GradableEpisode):
        return await episode.finish()
    return StepResult((), 0.0, False, True, Info({}, False))


class EnvironmentBackend(Protocol):
    """Interface to one environment.

    Every call raises NotFound (split or task), Busy, GivenUp, and VolleyError for a defect of the environment.
    """

    async def splits(self) -> tuple[str, ...]: ...

    async def num_tasks(self, split: str) -> int: ...

    async def task(self, split: str, index: int) -> str:
        """Readable id of a task, unique to it."""
        ...

    async def reset(self, split: str, index: int, seed: int) -> LiveEpisode: ...

    async def demonstration(self, split: str, index: int) -> Demonstration: ...

    def stuck_reason(self) -> str | None:
        """Return why its calls are refused or fail at present; None if they do not."""
        ...


async def demonstrations(backend: EnvironmentBackend, split: str, indices: Sequence[int]) -> list[Demonstration]:
    """Show demonstrations of several tasks, a few at a time. Raises the first error.

    After an error no call starts. Calls that run are not cancelled: their threads would count as hung.
    """
    places, found, errors = iter(range(len(indices))), dict[int, Demonstration](), list[VolleyError]()

    async def show() -> None:
        for place in places:
            if errors:
                return
            try:
                found[place] = await backend.demonstration(split, indices[place])
            except VolleyError as error:
                errors.append(error)

    async with asyncio.TaskGroup() as group:
        for _ in range(_SHOWN_AT_ONCE):
            group.create_task(show())
    if errors:
        raise errors[0]
    return [found[place] for place in range(len(indices))]
