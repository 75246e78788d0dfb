"""Where an environment's code runs, as the service sees it: asynchronous calls, each with a deadline, that raise
VolleyErrors alone.

Invariants: the event loop never runs environment code; what one environment does costs the others nothing but time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

from services.env.episode_types import Demonstration, Info, Message, StepResult, check_task
from shared.process import telemetry

type Call = Literal["load", "list", "reset", "step", "demonstrate"]

CALL_SECONDS = telemetry.Histogram(
    "volley_env_call_seconds", "Duration of a call into environment code", ["env", "call"], registry=telemetry.REGISTRY
)


@lru_cache(maxsize=1024)
def call_seconds(env: str, call: Call) -> telemetry.Histogram:
    """Where the durations of one environment's calls are counted; looked up once, for steps are many."""
    return CALL_SECONDS.labels(env, call)


class LiveEpisode(Protocol):
    """One conversation in progress: a readable id of its task, the messages the assistant answers first, JSON schemas
    of the tools in OpenAI's shape, and the database that its task is about, as the SQL tool takes it.
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
        """Answers one assistant message. Raises Busy (repeat it), Conflict (repeat the one before; neither harms the
        episode), GivenUp, VolleyError for a defect.
        """
        ...

    async def close(self) -> None:
        """Frees what the episode holds; it is not stepped again. Repeating it changes nothing; never raises."""
        ...


@runtime_checkable
class FinishedEpisode(Protocol):
    """An episode that is worth something also where its client takes it no further."""

    async def finish(self) -> StepResult:
        """Truncated, with what it is worth as it stands. Raises what `LiveEpisode.step` does."""
        ...


async def finished(episode: LiveEpisode) -> StepResult:
    """What an episode is worth that its client takes no further: truncated, mostly without a reward."""
    if isinstance(episode, FinishedEpisode):
        return await episode.finish()
    return StepResult((), 0.0, False, True, Info({}, False))


class Backend(Protocol):
    """One environment. Every call raises NotFound (split or task), Busy, GivenUp, and VolleyError for a defect of the
    environment.
    """

    async def splits(self) -> tuple[str, ...]: ...

    async def num_tasks(self, split: str) -> int: ...

    async def task(self, split: str, index: int) -> str:
        """A readable id that is unique to the task."""
        ...

    async def reset(self, split: str, index: int, seed: int) -> LiveEpisode: ...

    async def demonstration(self, split: str, index: int) -> Demonstration: ...

    def why_stuck(self) -> str | None:
        """Why its calls are refused, or fail, for now; None if they do not."""
        ...


class KnownSplits:
    """What a backend answers of its splits where their sizes were told once. `splits_of` is the number of tasks of each
    split; who inherits sets both.
    """

    name: str
    splits_of: Mapping[str, int]

    async def splits(self) -> tuple[str, ...]:
        return tuple(self.splits_of)

    async def num_tasks(self, split: str) -> int:
        check_task(self.name, self.splits_of, split, 0)
        return self.splits_of[split]


class EnvironmentDescription(Protocol):
    """What a submitted environment says of itself. `entry` is the class of its file, if it came as one."""

    @property
    def protocol(self) -> str: ...

    @property
    def entry(self) -> str | None: ...

    @property
    def splits(self) -> Mapping[str, int]: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def has_demonstration(self) -> bool: ...


class SubmittedBackend(Backend, Protocol):
    """A backend of something submitted, which is validated before it is used.

    `splits_of` is the number of tasks of each split. `is_remote`: it is played at somebody else's server, which nothing
    makes repeat itself. `log`: the newest lines that it printed, and how its episodes failed.
    """

    @property
    def splits_of(self) -> Mapping[str, int]: ...

    @property
    def has_demonstration(self) -> bool: ...

    @property
    def is_remote(self) -> bool: ...

    @property
    def log(self) -> deque[str]: ...

    async def describe(self) -> EnvironmentDescription:
        """Raises VolleyError where it cannot be used."""
        ...
