"""Vocabulary of environments: tasks in splits, episodes, and steps in Gymnasium's five-tuple.

Invariants
- An `Environment` is immutable once built and shared by all its episodes; an `Episode` belongs to one client.
- `(split, index)` names the same task in every process; `(split, index, seed)` gives the same episode for the same
  messages.
- The code is synchronous, CPU-only and independent of HTTP. It runs in threads: two episodes may run at once, two steps
  of one episode never do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypedDict, runtime_checkable

import orjson

from shared.errors import NotFound

TRAIN, EVAL = "train", "eval"

MAX_REWARD = 1e6
"""Largest size of a configured reward, which keeps sums of rewards far from infinity."""

MAX_EXPECTED = 4000
"""Most characters of the right answer that an episode returns for a judge to grade by."""

type Fault = Literal["format", "invalid_action", "tool"]
"""Model's mistake in a turn: an unreadable answer, an unknown action, or a failed tool call."""


class Message(TypedDict):
    """One chat message. `tool_calls` has OpenAI's shape: [{"function": {"name", "arguments"}}]."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[Any]]


@dataclass(frozen=True, slots=True)
class Info:
    """Details of a step's result.

    `reward_components` sums to the step's reward; `success` says whether the task is solved; `error` is the model's
    mistake in this turn, if any; `extra` holds the environment's own fields.
    """

    reward_components: Mapping[str, float]
    success: bool
    error: Fault | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class StepResult:
    """Gymnasium's (observation, reward, terminated, truncated, info); the observation is messages."""

    messages: tuple[Message, ...]
    reward: float
    terminated: bool
    truncated: bool
    info: Info

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation of one task, from the first message to the assistant's last.

    `success` says whether it solves the task; `tools` are the tools that episodes of the task have.
    """

    messages: tuple[Message, ...]
    success: bool
    tools: Sequence[Mapping[str, Any]] = ()


class Episode(Protocol):
    """One conversation in progress."""

    @property
    def opening(self) -> tuple[Message, ...]:
        """Messages that the assistant answers first. Read once, before the first step."""
        ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools, in OpenAI's shape."""
        ...

    def step(self, message: Message) -> StepResult:
        """Answer one assistant message. Not called again after a result that is `over`."""
        ...


@runtime_checkable
class DatabaseEpisode(Episode, Protocol):
    """An episode about a database that the SQL tool opens.

    `database` is JSON text in the format of the tool's library.
    """

    @property
    def database(self) -> str: ...


class AsyncEpisode(Protocol):
    """An episode whose step is a coroutine, for steps that only wait."""

    @property
    def opening(self) -> tuple[Message, ...]: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    async def step(self, message: Message) -> StepResult:
        """Answer one assistant message, without blocking the loop. Raises Busy if the client should repeat it."""
        ...


class Tasks(Protocol):
    """The tasks of an environment."""

    @property
    def splits(self) -> tuple[str, ...]: ...

    def num_tasks(self, split: str) -> int:
        """Raises NotFound on an unknown split."""
        ...

    def task(self, split: str, index: int) -> str:
        """Readable id of a task, unique to it. Raises NotFound outside 0 <= index < num_tasks(split)."""
        ...

    def demonstration(self, split: str, index: int) -> Demonstration:
        """Return a conversation to learn from; `success` is False if it does not solve the task. Raises NotFound."""
        ...


class Environment(Tasks, Protocol):
    """Interface that the author of an environment implements."""

    def reset(self, split: str, index: int, seed: int) -> Episode:
        """Start an episode; `seed` drives everything random after the choice of the task. Raises NotFound."""
        ...


class AsyncEnvironment(Tasks, Protocol):
    """An environment whose episodes are `AsyncEpisode`s; `reset` still runs in a thread."""

    def reset(self, split: str, index: int, seed: int) -> AsyncEpisode: ...


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def check_task(env: str, counts: Mapping[str, int], split: str, index: int) -> None:
    """Raises NotFound unless `split` is one of `counts` and 0 <= index < counts[split]."""
    if split not in counts:
        raise NotFound(f"{env} has no split {split!r}", f"it has: {', '.join(counts)}")
    if not 0 <= index < counts[split]:
        raise NotFound(f"{env}/{split} has no task {index}", f"indices run from 0 to {counts[split] - 1}")


def fingerprint(message: Message) -> str:
    """Digest of a message, to compare requests with the same id."""
    try:
        content = orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate, or an integer beyond 64 bits: orjson cannot write either
        content = json.dumps(message, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
