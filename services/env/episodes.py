"""Episodes in progress: their ids, their lifetime, and the idempotence of requests.

Invariants
- `request_id` makes create and step idempotent: a repeated request gets the same answer; a different request with the
  same id gets a 409.
- One request at a time steps an episode, never after its end, and never after a call into it failed.
- At most `max_episodes` are open, each answers at most MAX_STEPS messages, and one that is unused for `ttl_s` is
  forgotten.
- An episode's resources (a process, if its code is sandboxed) are freed when it ends, fails, or is forgotten. No other
  client's request waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any

from services.env.backend import (
    AgentPlayed,
    LiveEpisode,
    ModelAddress,
    ProgramState,
    SeatedEpisode,
    finish_early,
    restore,
)
from services.env.episode_slots import EpisodeCall, EpisodeRequest, EpisodeSlot, EpisodeWatcher, slow_calls
from services.env.episode_types import Message, StepResult, assistant, fingerprint
from services.env.extension import AddedRewards
from shared.errors import (
    Busy,
    Conflict,
    InputError,
    NotFound,
    RateLimited,
    RewardFailed,
    SandboxFailed,
    StorageUnavailable,
    Unavailable,
    VolleyError,
)
from shared.process import telemetry, tracing

MAX_STEPS = 1000
_FINISHED = "finish_early"
_MAX_LOGGED = 4000
_log = telemetry.Log("episodes")

_OPEN = telemetry.Gauge("volley_env_episodes", "Open episodes", registry=telemetry.REGISTRY)
_EVENTS = telemetry.Counter(
    "volley_env_episode_events",
    "Episodes by what became of them",
    ["env", "event"],
    registry=telemetry.REGISTRY,
)


class Episodes:
    """Store of the service's episodes. One that is over keeps its last answer, so that its last step can be repeated.

    Args:
        ttl_s: idle life of an episode.
        deadline_s: longest wait of a request for earlier requests to the same episode.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_episodes: int,
        ttl_s: float,
        deadline_s: float,
        watcher: EpisodeWatcher | None = None,
        rewards: AddedRewards | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ttl_s = ttl_s
        self._max, self._deadline_s, self._watcher, self._clock = max_episodes, deadline_s, watcher, clock
        self._max_over = max(1, max_episodes // 4)
        self._rewards = rewards
        self._slots: OrderedDict[str, EpisodeSlot] = OrderedDict()
        self._by_request: dict[str, EpisodeSlot] = {}
        self._over: dict[str, None] = {}  # ids of slots whose episode is over, in the order of their ends
        self._done: list[LiveEpisode] = []
        self._starting: list[Coroutine[Any, Any, None]] = []
        self._calls: dict[str, tuple[str, float]] = {}
        self._ended = asyncio.Event()

    def __len__(self) -> int:
        """Number of open episodes."""
        return len(self._slots) - len(self._over)

    async def create(self, request_id: str, request: EpisodeRequest) -> EpisodeSlot:
        """Start an episode, or return the one that this request started.

        Raises NotFound (task), Conflict (id reused), RateLimited (full), Unavailable (the reset took too long).
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
                if slot.over:
                    raise Conflict(f"episode {slot.id} is over", "create another one")
                await self._reset(slot)
        finally:
            slot.lock.release()
        return slot

    async def step(self, episode_id: str, request_id: str, message: Message) -> StepResult:
        """Answer one assistant message.

        Raises NotFound (unknown or expired), Conflict (over, failed, or id reused), Unavailable (deadline), InputError
        (`tool_calls` in an episode without tools; the episode continues).
        """
        if message.get("tool_calls") and not ((slot := self._find(episode_id)).tools or slot.over):
            raise InputError(
                f"message.tool_calls: an episode of {slot.request.entry.name} has no tools to call",
                "send the answer as text in message.content",
            )
        return await self._answered(episode_id, request_id, fingerprint(message), lambda live: live.step(message))

    async def finish(self, episode_id: str, request_id: str, output: str | None = None) -> StepResult:
        """End an episode early and grade it as it stands. Raises what `step` does.

        Args:
            output: final output of an external agent.
        """

        async def ended(live: LiveEpisode) -> StepResult:
            if output is not None:
                self._agent(episode_id)[1].set_output(output)
            return await finish_early(live)

        digest = _FINISHED if output is None else f"{_FINISHED} {fingerprint(assistant(output))}"
        return await self._answered(episode_id, request_id, digest, ended)

    def run(self, episode_id: str, request_id: str, address: ModelAddress) -> ProgramState:
        """Start the program of an episode, once. A repeated request starts nothing.

        Raises NotFound, Conflict (no program, started by another request, or the episode is over).
        """
        slot, agent = self._agent(episode_id)
        if slot.over:
            raise Conflict(f"episode {episode_id} is over", "create another one")
        if agent.begin(request_id, address):
            self._start(self._play(slot, agent))
        return ProgramState("running")

    async def run_state(self, episode_id: str, wait_s: float) -> ProgramState:
        """State of the program, after its end or `wait_s`. Raises NotFound, Conflict (no program was started)."""
        return await self._agent(episode_id)[1].state(wait_s)

    def _agent(self, episode_id: str) -> tuple[EpisodeSlot, AgentPlayed]:
        """Raises NotFound, Conflict."""
        slot = self._find(episode_id)
        if (slot.over or slot.live) and slot.played_by is None:
            raise Conflict(f"an episode of {slot.request.entry.name} is played in steps", "POST …/step plays it")
        assert slot.played_by is not None
        return slot, slot.played_by

    async def _play(self, slot: EpisodeSlot, agent: AgentPlayed) -> None:
        """Run a program, and report one that fails to the watcher."""
        began = self._clock()
        await agent.play()
        state = await agent.state(0.0)
        if state.state == "failed" and slot.id in self._slots:
            name = slot.request.entry.name
            _EVENTS.labels(name, "failed").inc()
            _log.warning("program failed", env=name, reason=state.detail, output=state.output[-_MAX_LOGGED:])
            self._report_call(slot, 1, began, SandboxFailed(state.detail))

    async def _answered(
        self, episode_id: str, request_id: str, digest: str, call: Callable[[LiveEpisode], Awaitable[StepResult]]
    ) -> StepResult:
        """Run `call` once per request id. `digest` tells a repeated request from a different one with the same id."""
        slot = self._find(episode_id)
        await self._enter(slot)
        try:
            if (answered := slot.answers.get(request_id)) is not None:
                if answered[0] != digest:
                    raise Conflict(
                        f"request {request_id!r} was sent before with another message", "use a new request_id"
                    )
                return answered[1]
            if slot.over:
                raise Conflict(f"episode {episode_id} is over", "create another one")
            episode = slot.live
            if len(slot.answers) >= MAX_STEPS:
                raise Conflict(f"episode {episode_id} has answered {MAX_STEPS} messages", "create another one")
            result = await self._step(slot, episode, call)
            slot.answers[request_id] = (digest, result)
            if slot.over and slot.played_by is None:
                self._keep_last(slot, request_id)
            return result
        finally:
            slot.lock.release()

    async def delete(self, episode_id: str) -> None:
        """Forget an episode. Deleting an unknown id has no effect."""
        if (slot := self._slots.get(episode_id)) is not None:
            if slot.answers and not slot.over and slot.failure is None and self._watcher is not None:
                self._watcher.ended(slot.request.entry.name)  # the client stopped early, which is not a failure
            self._drop(slot)
            if slot.episode is not None:
                await slot.episode.close()

    async def close(self) -> None:
        """Forget all episodes and free their resources."""
        for slot in list(self._slots.values()):
            self._drop(slot)
            if slot.episode is not None:
                self._free(slot.episode)
        while self._done:
            await self._done.pop().close()
        while self._starting:
            self._starting.pop().close()

    def expire(self) -> int:
        """Forget expired episodes and return their number. `sweep` frees their resources."""
        now, n = self._clock(), 0
        while self._slots and (slot := next(iter(self._slots.values()))).deadline <= now:
            self._drop(slot)
            if slot.episode is not None and not slot.over:
                self._free(slot.episode)
            if not slot.over:
                _EVENTS.labels(slot.request.entry.name, "expired").inc()
            n += 1
        return n

    async def sweep(self) -> None:
        """Worker: expire episodes, free the resources of ended ones, and run programs, concurrently."""
        async with asyncio.TaskGroup() as group:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(30.0, self.ttl_s / 4)):
                        await self._ended.wait()
                self._ended.clear()
                self.expire()
                while self._done:
                    group.create_task(self._done.pop().close())
                while self._starting:
                    group.create_task(self._starting.pop())

    async def _enter(self, slot: EpisodeSlot) -> None:
        """Wait for earlier requests and take the lock, which the caller releases. Raises Busy at the deadline."""
        if not slot.lock.locked():
            await slot.lock.acquire()  # does not suspend
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
                slot.played_by = episode if isinstance(episode, AgentPlayed) else None
                slot.seated = episode if isinstance(episode, SeatedEpisode) and episode.seats else None
                episode = episode if self._rewards is None else self._rewards.wrap(entry.name, episode)
                if (snapshot := slot.request.snapshot) is not None:
                    await restore(entry.name, episode, snapshot)
            slot.episode = episode
        except VolleyError as error:
            slot.failure = error
            raise
        finally:
            if slot.episode is None:
                slot.failure = slot.failure or Unavailable(f"the reset of episode {slot.id} was given up")
                self._drop(slot)
        if self._slots.get(slot.id) is not slot:  # deleted during the reset
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
            if slot.id in self._slots:
                self._over[slot.id] = None
                if len(self._over) > self._max_over:
                    self._drop(self._slots[next(iter(self._over))])
                _OPEN.set(len(self))
            await episode.close()
        return result

    def _keep_last(self, slot: EpisodeSlot, request_id: str) -> None:
        """Keep only what a repeated last step needs. As after a deletion, `create` begins a new episode."""
        slot.answers = {request_id: slot.answers[request_id]}
        slot.episode, slot.opening, slot.tools = None, (), ()
        if self._by_request.get(slot.request_id) is slot:
            del self._by_request[slot.request_id]

    def _free(self, episode: LiveEpisode) -> None:
        """Let `sweep` free the episode's resources, for episodes that no request ends."""
        self._done.append(episode)
        self._ended.set()

    def _start(self, job: Coroutine[Any, Any, None]) -> None:
        """Let `sweep` run a job that outlives its request."""
        self._starting.append(job)
        self._ended.set()

    @contextlib.contextmanager
    def _watched(self, slot: EpisodeSlot, turn: int) -> Iterator[None]:
        """Report the call inside to the watcher.

        Errors of the client's input, of full or failing storage, and of judges are not counted against the environment.
        """
        env, began = slot.request.entry.name, self._clock()
        self._calls[slot.id] = env, began
        try:
            with tracing.span("environment step" if turn else "environment reset", {"volley.env": env}):
                yield
        except (InputError, RateLimited, StorageUnavailable, RewardFailed):
            raise
        except VolleyError as error:
            _EVENTS.labels(env, "failed").inc()
            self._report_call(slot, turn, began, error)
            raise
        else:
            self._report_call(slot, turn, began, None)
        finally:
            del self._calls[slot.id]

    def _report_call(self, slot: EpisodeSlot, turn: int, began: float, failure: VolleyError | None) -> None:
        if self._watcher is None:
            return
        env, sample = slot.request.entry.name, (slot.request.split, slot.request.index, slot.seed)
        self._watcher.called(EpisodeCall(env, sample, turn, self._clock() - began, failure))
        if failure is not None:
            self._watcher.ended(env)

    def waiting(self) -> Mapping[str, str]:
        """Return a sentence for each environment with slow calls."""
        return slow_calls(self._calls.values(), self._clock())

    def _admit(self, request_id: str, request: EpisodeRequest) -> EpisodeSlot:
        self.expire()
        if len(self) >= self._max:
            raise RateLimited(
                f"{self._max} episodes are open", "finish or delete some, or try again later", retry_after_s=2.0
            )
        seed, deadline = request.seed_for(request_id), self._clock() + self.ttl_s
        slot = EpisodeSlot(secrets.token_hex(8), request_id, request, seed, deadline)
        self._slots[slot.id] = self._by_request[request_id] = slot
        _OPEN.set(len(self))
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
        self._over.pop(slot.id, None)
        if self._by_request.get(slot.request_id) is slot:
            del self._by_request[slot.request_id]
        _OPEN.set(len(self))
