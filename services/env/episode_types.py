"""What an environment is: tasks in splits, and episodes that answer an assistant's message with Gymnasium's five-tuple.

Invariants
- An `Environment` is immutable once built and shared by all its episodes; an `Episode` belongs to one client.
- `(split, index)` names the same task in every process; `(split, index, seed)` gives the same episode for the same
  messages.
- All of it is synchronous, CPU-only code that knows nothing of HTTP. It runs in threads: two episodes at once, one
  episode never.
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
"""Largest size of a configured reward: sums of them stay far from infinity."""

MAX_EXPECTED = 4000
"""Characters of a right answer that an episode tells: a judge grades by it."""

type Fault = Literal["format", "invalid_action", "tool"]
"""What a model can do wrong in a turn: its answer holds nothing to read, names an unknown action, or calls a tool in
vain.
"""


class Message(TypedDict):
    """One chat message. `tool_calls` has OpenAI's shape: [{"function": {"name", "arguments"}}]."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[Any]]


@dataclass(frozen=True, slots=True)
class Info:
    """What an answer says beside the five-tuple's numbers.

    `reward_components` sums to the step's reward; `success` says whether the task is solved; `error` is the model's
    fault of this turn, if there was one; `extra` is the environment's own.
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
    """A conversation of one task, from the first message to the assistant's last; `success` says whether it solves the
    task; `tools` are those that its episodes have.
    """

    messages: tuple[Message, ...]
    success: bool
    tools: Sequence[Mapping[str, Any]] = ()


class Episode(Protocol):
    """One conversation in progress."""

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages the assistant answers first; read once, before the first step."""
        ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools, in OpenAI's shape."""
        ...

    def step(self, message: Message) -> StepResult:
        """Answers one assistant message. Never called again once the result says `over`."""
        ...


@runtime_checkable
class DatabaseEpisode(Episode, Protocol):
    """An episode about a database, which the SQL tool opens: JSON text as its library takes it."""

    @property
    def database(self) -> str: ...


class AsyncEpisode(Protocol):
    """An episode that waits instead of computing: its step is a coroutine of the event loop."""

    @property
    def opening(self) -> tuple[Message, ...]: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    async def step(self, message: Message) -> StepResult:
        """As `Episode.step`; must not block. Raises Busy to be asked again."""
        ...


class Tasks(Protocol):
    """The tasks of an environment."""

    @property
    def splits(self) -> tuple[str, ...]: ...

    def num_tasks(self, split: str) -> int:
        """Raises NotFound on an unknown split."""
        ...

    def task(self, split: str, index: int) -> str:
        """A readable id that is unique to the task. Raises NotFound outside 0 <= index < num_tasks(split)."""
        ...

    def demonstration(self, split: str, index: int) -> Demonstration:
        """A conversation to learn from; one that does not solve its task says so. Raises NotFound."""
        ...


class Environment(Tasks, Protocol):
    """What the author of an environment implements."""

    def reset(self, split: str, index: int, seed: int) -> Episode:
        """A new episode; `seed` drives whatever is random after the task is chosen. Raises NotFound."""
        ...


class AsyncEnvironment(Tasks, Protocol):
    """The same, of episodes that wait; `reset` still runs in a thread."""

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
    """Equal for equal messages: tells a repeated request from another one that reuses its id."""
    try:
        content = orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # half of a surrogate pair, or an integer beyond 64 bits, which only Python writes
        content = json.dumps(message, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
