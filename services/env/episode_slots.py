"""Records of episodes in progress: requests, slots, and calls into environments."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from services.env.backend import AgentPlayed, LiveEpisode, SeatedEpisode
from services.env.catalogue import CatalogueEntry
from services.env.episode_types import Message, StepResult
from shared.errors import Conflict, VolleyError

_SLOW_S = 5.0
"""Seconds after which an unanswered call is reported."""


class EpisodeCall(NamedTuple):
    """One call into an environment.

    `sample` (split, index, seed) is equal for replays of an episode; turn 0 is the reset; `failure` is set if the
    environment is at fault.
    """

    env: str
    sample: tuple[str, int, int]
    turn: int
    seconds: float
    failure: VolleyError | None = None


class EpisodeWatcher(Protocol):
    """Observer of calls into environments and of ends of episodes."""

    def called(self, call: EpisodeCall) -> None:
        """Record a call that was answered or failed."""
        ...

    def ended(self, env: str) -> None:
        """Record the end of an episode: over, deleted by its client, or failed through the environment's fault."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """A create request. `env` is the requested name, `entry` the catalogue entry that it stood for on arrival.

    `seed: None` derives a seed from the request's id. `snapshot` is the state to go on from, None for the beginning.
    """

    env: str
    split: str
    index: int
    seed: int | None
    entry: CatalogueEntry = field(compare=False)
    snapshot: Any = None

    def seed_for(self, request_id: str) -> int:
        if self.seed is not None:
            return self.seed
        return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=6).digest(), "big")


@dataclass(slots=True)
class EpisodeSlot:
    """One episode and its answers so far.

    `episode` is None until the reset has run; `played_by` is the same without rewards, if an agent plays it, and
    `seated` if it has seats.
    """

    id: str
    request_id: str
    request: EpisodeRequest
    seed: int
    deadline: float
    task: str = ""
    opening: tuple[Message, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    episode: LiveEpisode | None = None
    played_by: AgentPlayed | None = None
    seated: SeatedEpisode | None = None
    over: bool = False
    failure: VolleyError | None = None
    answers: dict[str, tuple[str, StepResult]] = field(default_factory=dict[str, tuple[str, StepResult]])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def live(self) -> LiveEpisode:
        """The episode. Raises Conflict if a call into it failed."""
        if self.failure is not None or self.episode is None:
            raise Conflict(f"episode {self.id} failed: {self.failure}", "create another one")
        return self.episode


def slow_calls(calls: Iterable[tuple[str, float]], now: float) -> dict[str, str]:
    """Return a sentence for each environment with slow calls, from environments and times of unanswered calls."""
    found = dict[str, list[float]]()
    for env, began in calls:
        if now - began >= _SLOW_S:
            found.setdefault(env, []).append(now - began)
    return {env: f"unanswered calls: {len(s)}, the oldest for {max(s):.0f} s" for env, s in found.items()}
