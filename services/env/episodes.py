"""Episodes in progress: who they are, how long they live, and that a repeated request has one effect.

Invariants
- `request_id` makes create and step idempotent: the same request again gets the same answer, another one under the same
  id a 409.
- An episode is stepped by one request at a time, never after its end, and never after a call into it failed.
- At most `max_episodes` exist, each answers at most MAX_STEPS messages; one that is not touched for `ttl_s` is
  forgotten.
- What an episode holds (a process, where its code is sandboxed) is freed when it is over, has failed, or is forgotten.
  Nobody else's request waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from services.env.backend import LiveEpisode, finished
from services.env.catalogue import CatalogueEntry
from services.env.episode_types import Message, StepResult, fingerprint
from services.env.rewards.rewards import Rewards
from shared.errors import (
    Busy,
    Conflict,
    InputError,
    NotFound,
    RateLimited,
    RewardFailed,
    StorageUnavailable,
    Unavailable,
    VolleyError,
)
from shared.process import telemetry

MAX_STEPS = 1000
_FINISHED = "finished"
_SLOW_S = 5.0
"""Seconds after which a call that is not answered is named."""

_OPEN = telemetry.Gauge("volley_env_episodes", "Episodes in memory", registry=telemetry.REGISTRY)
_EVENTS = telemetry.Counter(
    "volley_env_episode_events",
    "Episodes by what became of them",
    ["env", "event"],
    registry=telemetry.REGISTRY,
)


class EpisodeCall(NamedTuple):
    """A call into an environment. `sample` is equal for an episode that is played again; turn 0 is the reset; `failure`
    is set for one that is the environment's.
    """

    env: str
    sample: tuple[str, int, int]
    turn: int
    seconds: float
    failure: VolleyError | None = None


class EpisodeWatcher(Protocol):
    """Is told how the episodes of each environment fare."""

    def called(self, call: EpisodeCall) -> None:
        """A call was answered, or failed."""
        ...

    def ended(self, env: str) -> None:
        """An episode is over, was given up by its client, or failed for a reason that is the environment's."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """What a create request asks for; `env` is the name it used, `entry` what that stood for when it came. `seed: None`
    stands for one made from the request's id.
    """

    env: str
    split: str
    index: int
    seed: int | None
    entry: CatalogueEntry = field(compare=False)


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
    tools: Sequence[Mapping[str, Any]] = ()
    episode: LiveEpisode | None = None
    over: bool = False
    failure: VolleyError | None = None
    answers: dict[str, tuple[str, StepResult]] = field(default_factory=dict[str, tuple[str, StepResult]])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def live(self) -> LiveEpisode:
        """The episode. Raises Conflict when a call into it failed."""
        if self.failure is not None or self.episode is None:
            raise Conflict(f"episode {self.id} failed: {self.failure}", "create another one")
        return self.episode


class Episodes:
    """Args: ttl_s: idle life of an episode; deadline_s: how long a request waits for those before it; clock: monotonic
    seconds.
    """

    def __init__(
        self,
        *,
        max_episodes: int,
        ttl_s: float,
        deadline_s: float,
        watcher: EpisodeWatcher | None = None,
        rewards: Rewards | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ttl_s = ttl_s
        self._max, self._deadline_s, self._watcher, self._clock = max_episodes, deadline_s, watcher, clock
        self._rewards = rewards
        self._slots: OrderedDict[str, EpisodeSlot] = OrderedDict()
        self._by_request: dict[str, EpisodeSlot] = {}
        self._done: list[LiveEpisode] = []
        self._calls: dict[str, tuple[str, float]] = {}
        self._ended = asyncio.Event()

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
        await self._enter(slot)
        try:
            if slot.failure is not None:
                raise slot.failure
            if slot.episode is None:
                await self._reset(slot)
        finally:
            slot.lock.release()
        return slot

    async def step(self, episode_id: str, request_id: str, message: Message) -> StepResult:
        """Raises NotFound (unknown or expired), Conflict (over, failed, or id reused), Unavailable (did not end in
        time), InputError (`tool_calls` where the episode offers no tools; it goes on).
        """
        if message.get("tool_calls") and not (slot := self._find(episode_id)).tools:
            raise InputError(
                f"message.tool_calls: an episode of {slot.request.entry.name} has no tools to call",
                "send the answer as text in message.content",
            )
        return await self._answered(episode_id, request_id, fingerprint(message), lambda live: live.step(message))

    async def finish(self, episode_id: str, request_id: str) -> StepResult:
        """Ends an episode that its client takes no further: what it is worth as it stands. Raises what `step` does."""
        return await self._answered(episode_id, request_id, _FINISHED, finished)

    async def _answered(
        self, episode_id: str, request_id: str, digest: str, call: Callable[[LiveEpisode], Awaitable[StepResult]]
    ) -> StepResult:
        """What `call` makes of the episode; `digest` tells the same request from another one."""
        slot = self._find(episode_id)
        await self._enter(slot)
        try:
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
            result = await self._step(slot, episode, call)
            slot.answers[request_id] = (digest, result)
            return result
        finally:
            slot.lock.release()

    async def delete(self, episode_id: str) -> None:
        """Forgets an episode; one that does not exist is forgotten already."""
        if (slot := self._slots.get(episode_id)) is not None:
            if slot.answers and not slot.over and slot.failure is None and self._watcher is not None:
                self._watcher.ended(slot.request.entry.name)  # its client has had enough: no fault of anybody
            self._drop(slot)
            if slot.episode is not None:
                await slot.episode.close()

    async def close(self) -> None:
        """Forgets all episodes, and frees what they hold."""
        for slot in list(self._slots.values()):
            self._drop(slot)
            if slot.episode is not None:
                self._free(slot.episode)
        while self._done:
            await self._done.pop().close()

    def expire(self) -> int:
        """Forgets the episodes whose time is up; returns how many. `sweep` frees what they hold."""
        now, n = self._clock(), 0
        while self._slots and (slot := next(iter(self._slots.values()))).deadline <= now:
            self._drop(slot)
            if slot.episode is not None:
                self._free(slot.episode)
            _EVENTS.labels(slot.request.entry.name, "expired").inc()
            n += 1
        return n

    async def sweep(self) -> None:
        """Worker: expires episodes, and frees what those hold that have ended, none behind another."""
        async with asyncio.TaskGroup() as group:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(30.0, self.ttl_s / 4)):
                        await self._ended.wait()
                self._ended.clear()
                self.expire()
                while self._done:
                    group.create_task(self._done.pop().close())

    async def _enter(self, slot: EpisodeSlot) -> None:
        """Waits for the requests before this one; the lock is to be released. Raises Busy if they take too long."""
        if not slot.lock.locked():
            await slot.lock.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                await slot.lock.acquire()
        except TimeoutError:
            raise Busy(f"episode {slot.id} is busy with another request", "send one request at a time") from None

    async def _reset(self, slot: EpisodeSlot) -> None:
        entry = slot.request.entry
        try:
            with self._watched(slot, 0):
                episode = await entry.backend.reset(slot.request.split, slot.request.index, slot.seed)
            slot.episode = episode if self._rewards is None else self._rewards.around(entry.name, episode)
        except VolleyError as error:
            slot.failure = error
            raise
        finally:
            if slot.episode is None:
                slot.failure = slot.failure or Unavailable(f"the reset of episode {slot.id} was given up")
                self._drop(slot)
        if self._slots.get(slot.id) is not slot:  # it was deleted meanwhile
            self._free(slot.episode)
        slot.task, slot.opening, slot.tools = slot.episode.task, slot.episode.opening, slot.episode.tools
        _EVENTS.labels(entry.name, "created").inc()

    async def _step(
        self, slot: EpisodeSlot, episode: LiveEpisode, call: Callable[[LiveEpisode], Awaitable[StepResult]]
    ) -> StepResult:
        entry = slot.request.entry
        try:
            with self._watched(slot, len(slot.answers) + 1):
                result = await call(episode)
        except (Busy, Conflict):
            raise
        except BaseException as error:
            given_up = Unavailable(f"a step of episode {slot.id} was given up")
            slot.failure = error if isinstance(error, VolleyError) else given_up
            if not isinstance(error, VolleyError):
                self._free(episode)
                raise
            await episode.close()
            raise
        slot.over = result.over
        if result.over:
            event = "succeeded" if result.info.success else "terminated" if result.terminated else "truncated"
            _EVENTS.labels(entry.name, event).inc()
            if self._watcher is not None:
                self._watcher.ended(entry.name)
            await episode.close()
        return result

    def _free(self, episode: LiveEpisode) -> None:
        """Has `sweep` free what it holds. For episodes whose end nobody asked for."""
        self._done.append(episode)
        self._ended.set()

    @contextlib.contextmanager
    def _watched(self, slot: EpisodeSlot, turn: int) -> Iterator[None]:
        """Tells the watcher of the call inside. What the client asked for in vain, what the service had no room for,
        and what a judge did not answer say nothing about the environment.
        """
        env, began = slot.request.entry.name, self._clock()
        self._calls[slot.id] = env, began
        try:
            yield
        except (InputError, RateLimited, StorageUnavailable, RewardFailed):
            raise
        except VolleyError as error:
            _EVENTS.labels(env, "failed").inc()
            self._tell(slot, turn, began, error)
            raise
        else:
            self._tell(slot, turn, began, None)
        finally:
            del self._calls[slot.id]

    def _tell(self, slot: EpisodeSlot, turn: int, began: float, failure: VolleyError | None) -> None:
        if self._watcher is None:
            return
        env, sample = slot.request.entry.name, (slot.request.split, slot.request.index, slot.seed)
        self._watcher.called(EpisodeCall(env, sample, turn, self._clock() - began, failure))
        if failure is not None:
            self._watcher.ended(env)

    def waiting(self) -> Mapping[str, str]:
        """By environment, a sentence on the calls that it has not answered for long."""
        now, found = self._clock(), dict[str, list[float]]()
        for env, began in self._calls.values():
            if now - began >= _SLOW_S:
                found.setdefault(env, []).append(now - began)
        return {env: f"unanswered calls: {len(s)}, the oldest for {max(s):.0f} s" for env, s in found.items()}

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
