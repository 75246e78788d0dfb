"""Simulated time, rollout servers, environment, queue and trainer around the orchestrator's own parts.

Time is simulated: the event loop's clock jumps to the next timer whenever nothing else is left to do. So results do not
depend on the machine, and an hour of generation takes seconds.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.orchestrator.servers.balancer import Balancer, ServerLoad
from shared.clients.env import Opening, ProgramReply, StepReply
from shared.clients.rollout import EngineLoad, Generation, ServerWeights
from shared.errors import NotFound, ServiceUnreachable
from shared.queue.records import Published, PublishRefusal, QueueState, Reservation
from shared.teacher_view import TeacherLogprobs
from shared.types import Group, VersionSpan, WeightVersion

TOKEN_S = 0.02
"""Time of one decoded token. Prefill is `_PREFILL` times as fast."""
_PREFILL = 50
_SIGMA = math.log(100) / (2 * 2.576)
"""Spread of lognormal lengths of which 99 % lie within a ratio of 100:1."""
_PREFIX = 40


class _Jumping(selectors.DefaultSelector):
    """Never sleeps: moves the clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout is None:
            events = super().select(1.0)  # a thread may be at work
        elif not events:
            self.now += timeout or 0.0
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def simulate[T](work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)


def length(seed: int, mean: float) -> int:
    """Return a lognormal number of tokens, a pure function of the seed."""
    rng = np.random.default_rng(seed)
    return max(1, round(mean * math.exp(_SIGMA * rng.standard_normal() - _SIGMA**2 / 2)))


@dataclass
class SimulatedServer:
    """A `GenerateClient` with `slots` requests at once, and a prefix cache of `cache_tokens` in least-recent order."""

    slots: int
    mean_tokens: float
    cache_tokens: int = 10**9
    context_scale: int = 1
    versions: list[tuple[float, str]] = field(default_factory=lambda: [(0.0, "e000001-s000000")])
    running: int = 0
    queued: int = 0
    sampled: int = 0
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)
        self._died, self._drained = asyncio.Future[None](), asyncio.Future[None]()
        self._cached = OrderedDict[bytes, int]()

    async def generate(
        self,
        input_ids: np.ndarray,
        sampling: Mapping[str, Any],
        rid: str,
        *,
        timeout_s: float | None = None,
        routed_from: int | None = None,
    ) -> Generation:
        died, drained, self.queued = self._died, self._drained, self.queued + 1
        try:
            await self._free.acquire()
        finally:
            self.queued -= 1
        loop = asyncio.get_running_loop()
        n = min(length(sampling["sampling_seed"], self.mean_tokens), int(sampling["max_new_tokens"]))
        prefill_s = self._uncached(input_ids, n) * TOKEN_S / _PREFILL
        self.running, began = self.running + 1, loop.time()
        try:
            await asyncio.wait([died, drained], timeout=prefill_s + n * TOKEN_S, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise ServiceUnreachable("killed")
        finally:
            self.running -= 1
            self.busy_s += loop.time() - began
            self.sampled += min(n, max(0, round((loop.time() - began - prefill_s) / TOKEN_S)))
            self._free.release()
        rng = np.random.default_rng(sampling["sampling_seed"])
        ids = rng.integers(10, 200, n).astype(np.int32)
        if drained.done():
            n = min(n, max(0, int((loop.time() - began - prefill_s) / TOKEN_S)))
            spans = self._spans(began + prefill_s, n)
            return Generation(ids[:n], np.full(n, -0.5, np.float32), spans, "abort")
        if n < sampling["max_new_tokens"]:
            ids[-1] = sampling["stop_token_ids"][0]
        return Generation(ids, np.full(n, -0.5, np.float32), self._spans(began + prefill_s, n), "stop")

    def _uncached(self, ids: np.ndarray, n: int) -> int:
        """Tokens to prefill; the episode's prefix is then the most recent of the cache."""
        key = ids[:_PREFIX].tobytes()
        known = self._cached.pop(key, 0)
        self._cached[key] = self.context_scale * (len(ids) + n)
        while sum(self._cached.values()) > self.cache_tokens and len(self._cached) > 1:
            self._cached.popitem(last=False)
        return max(0, self.context_scale * len(ids) - known)

    def _spans(self, first_s: float, n: int) -> tuple[VersionSpan, ...]:
        """Attribute each token to the version that served when it was decoded."""
        starts = [min(n, max(0, math.ceil((at - first_s) / TOKEN_S))) for at, _ in self.versions]
        ends = [*starts[1:], n]
        return tuple(
            VersionSpan(name, start, end)
            for (_, name), start, end in zip(self.versions, starts, ends, strict=True)
            if end > start
        )

    def kill(self) -> None:
        """End all running requests with an error; the next ones start with an empty cache."""
        self._died.set_result(None)
        self._died = asyncio.Future[None]()
        self._cached.clear()

    def drain(self) -> None:
        """End all running requests with the tokens they have; the next ones start with an empty cache."""
        self._drained.set_result(None)
        self._drained = asyncio.Future[None]()
        self._cached.clear()

    async def score(self, ids: np.ndarray, start: int, *, timeout_s: float | None = None) -> TeacherLogprobs:
        return TeacherLogprobs(np.full(len(ids) - start, -0.5, np.float32), self.versions[-1][1])

    async def abort(self, rid: str) -> None: ...

    async def weights(self) -> ServerWeights:
        return ServerWeights(self.versions[-1][1], None, None)

    async def load(self) -> EngineLoad:
        return EngineLoad(self.running, self.queued, self.slots, 1.0)

    async def ready(self) -> None: ...

    async def hold(self, holder: str, version: str, seconds: float) -> None: ...


@dataclass
class SimulatedEnv:
    """Episodes of `n_turns` turns; a step takes `step_s`."""

    n_turns: int
    step_s: float = 0.0
    open: set[str] = field(default_factory=set[str])

    async def create(
        self, request_id: str, env: str, split: str, index: int, *, seed: int, snapshot: Any = None
    ) -> Opening:
        self.open.add(request_id)
        return Opening(request_id, f"{split}/{index}", [{"role": "user", "content": f"{seed} {index} {request_id}"}])

    async def step(self, episode_id: str, request_id: str, content: str) -> StepReply:
        if episode_id not in self.open:
            raise NotFound("the episode is gone")
        await asyncio.sleep(self.step_s)
        over = int(request_id.rpartition("-")[2]) >= self.n_turns
        return StepReply([] if over else [{"role": "user", "content": "next"}], float(len(content) % 2), over, False)

    async def finish(self, episode_id: str, request_id: str, output: str | None = None) -> StepReply:
        raise NotFound("nothing is scored at the end")

    async def run_program(
        self, episode_id: str, request_id: str, base_url: str, api_key: str, model: str
    ) -> ProgramReply:
        raise NotFound("no program plays here")

    async def program(self, episode_id: str, wait_s: float = 0.0) -> ProgramReply:
        raise NotFound("no program plays here")

    async def delete_episode(self, episode_id: str) -> None:
        self.open.discard(episode_id)

    async def ready(self) -> None: ...


@dataclass
class SimulatedTrainer:
    """The queue's rules in memory, and a trainer that takes complete groups in order of arrival."""

    batch: int
    max_staleness: int
    balancer: Balancer
    servers: list[SimulatedServer]
    step_s: float = 0.0
    version: int = 0
    issued: int = 0
    void: int = 0
    trained_tokens: int = 0
    wasted_tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter[str])
    arrived: list[Group] = field(default_factory=list[Group])

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        self._pool = list[int]()

    async def reserve_wait(
        self, ttl_s: float, batch: int, max_staleness: int, total: int, deadline_s: float, ahead: int | None = None
    ) -> Reservation | PublishRefusal:
        cap = (max_staleness + 1) * batch
        cap = cap if ahead is None else min(cap, ahead)
        while True:
            if self._pool:
                return Reservation(self._pool.pop(0), self.version)
            useful = self.issued - self.void
            if useful < min(total, self.version * batch + cap):
                self.issued += 1
                return Reservation(self.issued, self.version)
            try:
                await asyncio.wait_for(self._changed.wait(), deadline_s)
            except TimeoutError:
                return PublishRefusal.EXHAUSTED if useful >= total else PublishRefusal.FULL

    async def renew(self, ticket: int, ttl_s: float) -> bool:
        if not ttl_s:
            self._pool.append(ticket)
            self._notify()
        return True

    async def publish(self, ticket: int, payload: bytes) -> Published:
        group = Group.decode(payload)
        if group.failure is None:
            self.arrived.append(group)
        else:
            self._end(f"filtered({group.rule})" if group.rule else "failed")
        self._notify()
        return Published.QUEUED

    async def state(self) -> QueueState:
        return QueueState(self.issued, 0, self.version, 1, True, self.void, 0, 0, 0, 0, 0, 0, 0)

    async def train(self, n_steps: int) -> None:
        """Return when the steps are trained."""
        while self.version < n_steps:
            fresh = [g for g in self.arrived if self.version - g.oldest().step <= self.max_staleness]
            for group in self.arrived:
                if group not in fresh:
                    self._waste(group, "stale")
            self.arrived = fresh
            if len(fresh) < self.batch:
                self._notify()
                await self._changed.wait()
                continue
            taken, self.arrived = fresh[: self.batch], fresh[self.batch :]
            self.ends["trained"] += len(taken)
            self.trained_tokens += sum(map(_n_sampled, taken))
            await asyncio.sleep(self.step_s)
            self.version += 1
            self._serve(WeightVersion(1, self.version))

    def discard(self) -> None:
        """Throw away finished surplus, and the tickets of stopped groups."""
        for group in self.arrived:
            self._waste(group, "discarded")
        for _ in self._pool:
            self._end("discarded")
        self.arrived, self._pool = [], []

    def _serve(self, version: WeightVersion) -> None:
        now = asyncio.get_running_loop().time()
        for server in self.servers:
            server.versions.append((now, str(version)))
        self.balancer.set_target(version, ((1, 0),))
        for load in self.balancer.servers:
            if not load.out:
                self.balancer.observe(load, version)
        self._notify()

    def _waste(self, group: Group, disposition: str) -> None:
        self.wasted_tokens += _n_sampled(group)
        self._end(disposition)

    def _end(self, disposition: str) -> None:
        self.ends[disposition] += 1
        self.void += 1

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _n_sampled(group: Group) -> int:
    return sum(episode.n_sampled for episode in group.trajectories)


def balancer_of(servers: list[SimulatedServer], max_staleness: int) -> Balancer:
    """Return a balancer whose servers have been probed."""
    balancer = Balancer(max_staleness, asyncio.get_running_loop().time)
    balancer.set_target(WeightVersion(1, 0), ((1, 0),))
    for number, server in enumerate(servers):
        balancer.add(ServerLoad(f"http://server{number}", server, WeightVersion(1, 0), server.slots))
    return balancer
