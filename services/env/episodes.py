"""Episodes in progress: who they are, how long they live, and that a repeated request has one effect.

Invariants
- `request_id` makes create and step idempotent: the same request again gets the same answer, another one under the same
  id a 409.
- An episode is stepped by one request at a time, never after its end, and never after a call into it failed.
- At most `max_episodes` exist, each answers at most MAX_STEPS messages; one that is not touched for `ttl_s` is
  forgotten.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.env.catalogue import CatalogueEntry
from services.env.environments.base import Episode, Message, StepResult, fingerprint
from services.env.runner import Busy, Runner
from shared.errors import Conflict, NotFound, RateLimited, Unavailable, VolleyError
from shared.process import telemetry

MAX_STEPS = 1000

_OPEN = telemetry.Gauge("volley_env_episodes", "Episodes in memory", registry=telemetry.REGISTRY)
_EVENTS = telemetry.Counter(
    "volley_env_episode_events",
    "Episodes by what became of them",
    ["env", "event"],
    registry=telemetry.REGISTRY,
)


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """What a create request asks for. `seed: None` stands for one made from the request's id."""

    entry: CatalogueEntry
    split: str
    index: int
    seed: int | None


@dataclass(slots=True)
class EpisodeSlot:
    """One episode and what has been answered about it. `episode` is None until the reset has run."""

    id: str
    request_id: str
    request: EpisodeRequest
    seed: int
    deadline: float
    task: str = ""
    opening: tuple[Message, ...] = ()
    episode: Episode | None = None
    over: bool = False
    failure: VolleyError | None = None
    answers: dict[str, tuple[str, StepResult]] = field(default_factory=dict[str, tuple[str, StepResult]])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def live(self) -> Episode:
        """The episode. Raises Conflict when a call into it failed."""
        if self.failure is not None or self.episode is None:
            raise Conflict(f"episode {self.id} failed: {self.failure}", "create another one")
        return self.episode


class Episodes:
    """Args: ttl_s: idle life of an episode; clock: monotonic seconds."""

    def __init__(
        self, runner: Runner, *, max_episodes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ttl_s = ttl_s
        self._runner, self._max, self._clock = runner, max_episodes, clock
        self._slots: OrderedDict[str, EpisodeSlot] = OrderedDict()
        self._by_request: dict[str, EpisodeSlot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    async def create(self, request_id: str, request: EpisodeRequest) -> EpisodeSlot:
        """A running episode. Raises NotFound (task), Conflict (id reused), RateLimited (full), Unavailable (the reset
        took too long).
        """
        slot = self._by_request.get(request_id) or self._admit(request_id, request)
        if slot.request != request:
            raise Conflict(f"request {request_id!r} was sent before with another body", "use a new request_id")
        self._touch(slot)
        async with self._alone(slot):
            if slot.failure is not None:
                raise slot.failure
            if slot.episode is None:
                await self._reset(slot)
        return slot

    async def step(self, episode_id: str, request_id: str, message: Message) -> StepResult:
        """Raises NotFound (unknown or expired), Conflict (over, failed, or id reused), Unavailable (did not end in
        time).
        """
        slot = self._find(episode_id)
        async with self._alone(slot):
            digest = fingerprint(message)
            if (answered := slot.answers.get(request_id)) is not None:
                if answered[0] != digest:
                    raise Conflict(
                        f"request {request_id!r} was sent before with another message", "use a new request_id"
                    )
                return answered[1]
            episode = slot.live
            if slot.over:
                raise Conflict(f"episode {episode_id} is over", "create another one")
            if len(slot.answers) >= MAX_STEPS:
                raise Conflict(f"episode {episode_id} has answered {MAX_STEPS} messages", "create another one")
            result = await self._step(slot, episode, message)
            slot.answers[request_id] = (digest, result)
            return result

    def delete(self, episode_id: str) -> None:
        """Forgets an episode; one that does not exist is forgotten already."""
        if (slot := self._slots.get(episode_id)) is not None:
            self._drop(slot)

    def expire(self) -> int:
        """Forgets the episodes whose time is up; returns how many."""
        now, n = self._clock(), 0
        while self._slots and (slot := next(iter(self._slots.values()))).deadline <= now:
            self._drop(slot)
            _EVENTS.labels(slot.request.entry.name, "expired").inc()
            n += 1
        return n

    async def sweep(self) -> None:
        """Expires episodes for as long as the service lives."""
        while True:
            await asyncio.sleep(min(30.0, self.ttl_s / 4))
            self.expire()

    @asynccontextmanager
    async def _alone(self, slot: EpisodeSlot) -> AsyncIterator[None]:
        """Raises Busy if the requests before this one take too long."""
        try:
            async with asyncio.timeout(self._runner.deadline_s):
                await slot.lock.acquire()
        except TimeoutError:
            raise Busy(f"episode {slot.id} is busy with another request", "send one request at a time") from None
        try:
            yield
        finally:
            slot.lock.release()

    async def _reset(self, slot: EpisodeSlot) -> None:
        entry, split, index = slot.request.entry, slot.request.split, slot.request.index

        def reset() -> tuple[str, tuple[Message, ...], Episode]:
            episode = entry.environment.reset(split, index, slot.seed)
            return entry.environment.task(split, index), episode.opening, episode

        try:
            slot.task, slot.opening, slot.episode = await self._runner.run(entry, "reset", reset)
        except VolleyError as error:
            slot.failure = error
            raise
        finally:
            if slot.episode is None:
                slot.failure = slot.failure or Unavailable(f"the reset of episode {slot.id} was given up")
                self._drop(slot)
        _EVENTS.labels(entry.name, "created").inc()

    async def _step(self, slot: EpisodeSlot, episode: Episode, message: Message) -> StepResult:
        entry = slot.request.entry
        try:
            result = await self._runner.run(entry, "step", lambda: episode.step(message))
        except Busy:
            raise
        except BaseException as error:
            slot.failure = (
                error if isinstance(error, VolleyError) else Unavailable(f"a step of episode {slot.id} was given up")
            )
            raise
        slot.over = result.over
        if result.over:
            event = "succeeded" if result.info.success else "terminated" if result.terminated else "truncated"
            _EVENTS.labels(entry.name, event).inc()
        return result

    def _admit(self, request_id: str, request: EpisodeRequest) -> EpisodeSlot:
        self.expire()
        if len(self._slots) >= self._max:
            raise RateLimited(
                f"{self._max} episodes are open", "finish or delete some, or try again later", retry_after_s=2.0
            )
        seed = request.seed if request.seed is not None else _seed_from(request_id)
        slot = EpisodeSlot(secrets.token_hex(8), request_id, request, seed, self._clock() + self.ttl_s)
        self._slots[slot.id] = self._by_request[request_id] = slot
        _OPEN.set(len(self._slots))
        return slot

    def _find(self, episode_id: str) -> EpisodeSlot:
        self.expire()
        slot = self._slots.get(episode_id)
        if slot is None:
            raise NotFound(f"there is no episode {episode_id[:80]}", f"it ended, or was not used for {self.ttl_s:g} s")
        self._touch(slot)
        return slot

    def _touch(self, slot: EpisodeSlot) -> None:
        if slot.id in self._slots:
            slot.deadline = self._clock() + self.ttl_s
            self._slots.move_to_end(slot.id)

    def _drop(self, slot: EpisodeSlot) -> None:
        self._slots.pop(slot.id, None)
        if self._by_request.get(slot.request_id) is slot:
            del self._by_request[slot.request_id]
        _OPEN.set(len(self._slots))


def _seed_from(request_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=6).digest(), "big")
