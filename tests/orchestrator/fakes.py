"""A scripted engine, environment and queue: small implementations of the orchestrator's Protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.groups import GroupPlan
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.episodes.turn import SamplingSpec, TokenBounds
from services.orchestrator.servers.balancer import Balancer, ServerLoad, VersionBounds
from services.orchestrator.servers.slots import Slots
from services.orchestrator.status import RunStatus
from shared.clients.env import Opening, StepReply
from shared.clients.rollout import Generation, ServerWeights
from shared.errors import Conflict, NotFound, QueueUnavailable, ServiceUnreachable, Unavailable, VolleyError
from shared.queue.records import Published, PublishRefusal, QueueState, Reservation
from shared.run.seeding import TaskOrder, TicketTask
from shared.teacher_view import TeacherLogprobs
from shared.types import Message, VersionSpan, WeightVersion
from tests.support.tokenizer import tiny_tokenizer

V0 = WeightVersion(1, 0)
BOUNDS = TokenBounds(context_length=256, max_response_length=16, max_turns=4, timeout_s=60.0, max_attempts=3)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


@dataclass(frozen=True)
class Say:
    """One scripted answer: the ids to emit (cut at max_new_tokens), why it ends, and who made each part."""

    ids: list[int]
    finish: str = "stop"
    versions: tuple[str, ...] = ()


@dataclass
class ScriptedEngine:
    """Answers from a script, else from the sampling seed; raises what `failures` holds first. Experts that are asked
    for are told with the number of the request, from 1 on, but not where that is in `tells_no_experts`. Greedy requests
    (those of evaluations) wait while `holds_greedy`.
    """

    script: list[Say] = field(default_factory=list)
    version: WeightVersion | None = V0
    failures: list[VolleyError] = field(default_factory=list)
    delay_s: float = 0.0
    holds_greedy: bool = False
    well: bool = True
    prompts: list[np.ndarray] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    params: list[Mapping[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    routed_from: list[int | None] = field(default_factory=list)
    tells_no_experts: set[int] = field(default_factory=set)
    holders: set[str] = field(default_factory=set)
    scored: list[tuple[np.ndarray, int]] = field(default_factory=list)

    async def generate(
        self,
        input_ids: np.ndarray,
        sampling: Mapping[str, Any],
        rid: str,
        *,
        timeout_s: float | None = None,
        routed_from: int | None = None,
    ) -> Generation:
        self.prompts.append(input_ids.copy())
        self.routed_from.append(routed_from)
        self.params.append(sampling)
        self.running.add(rid)
        await asyncio.sleep(self.delay_s)
        while self.holds_greedy and sampling["temperature"] == 0:
            await asyncio.sleep(0.01)
        if self.failures:
            raise self.failures.pop(0)
        self.running.discard(rid)
        say = self.script.pop(0) if self.script else self._seeded(sampling)
        n = sampling["max_new_tokens"]
        ids = say.ids[:n]
        finish = "length" if len(say.ids) > n else say.finish
        self.outputs.append(ids)
        versions = say.versions or (str(self.version),)
        cuts = np.linspace(0, len(ids), len(versions) + 1).astype(int).tolist()
        spans = tuple(VersionSpan(v, a, b) for v, a, b in zip(versions, cuts, cuts[1:], strict=False) if b > a)
        number, routed = len(self.prompts), None
        if routed_from is not None and number not in self.tells_no_experts:
            routed = np.full((len(input_ids) + len(ids) - 1 - routed_from, 2, 3), number, np.uint8)
        logprobs = np.full(len(ids), -0.5, np.float32)
        return Generation(np.array(ids, np.int32), logprobs, spans, finish, routed_experts=routed)

    async def score(self, ids: np.ndarray, start: int, *, timeout_s: float | None = None) -> TeacherLogprobs:
        """-t/100 at position t."""
        self.scored.append((ids.copy(), start))
        await asyncio.sleep(self.delay_s)
        if self.failures:
            raise self.failures.pop(0)
        return TeacherLogprobs(-np.arange(start, len(ids), dtype=np.float32) / 100, str(self.version))

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def weights(self) -> ServerWeights:
        if not self.well:
            raise ServiceUnreachable("engine is down")
        return ServerWeights(str(self.version) if self.version else None, None, None)

    async def ready(self) -> None:
        if not self.well:
            raise ServiceUnreachable("engine is down")

    async def hold(self, holder: str, version: str, seconds: float) -> None:
        if not self.well:
            raise ServiceUnreachable("engine is down")
        if seconds and version != str(self.version):
            raise Conflict(f"{version} does not serve")
        (self.holders.add if seconds else self.holders.discard)(holder)

    def _seeded(self, sampling: Mapping[str, Any]) -> Say:
        rng = np.random.default_rng(sampling["sampling_seed"])
        body = rng.integers(10, 200, rng.integers(1, 8)).tolist()
        return Say([*body, tiny_tokenizer().eos_id])


@dataclass
class ScriptedEnv:
    """Episodes of `n_turns` turns. Reward 1 for each turn; success at the end. `step_failures` are raised first."""

    n_turns: int = 2
    prompt: str = "play"
    reply: str = "next"
    n_tasks: int = 10
    delay_s: float = 0.0
    create_failures: list[VolleyError] = field(default_factory=list)
    step_failures: list[VolleyError] = field(default_factory=list)
    open: dict[str, int] = field(default_factory=dict)
    created: list[tuple[str, int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    respond: Callable[[str], StepReply] | None = None
    not_ready: int = 0
    end: StepReply | None = None
    broken: set[int] = field(default_factory=set)
    by_request: dict[str, str] = field(default_factory=dict)

    async def create(
        self, request_id: str, env: str, split: str, index: int, *, seed: int, snapshot: Any = None
    ) -> Opening:
        if self.create_failures:
            raise self.create_failures.pop(0)
        if index in self.broken:
            raise Unavailable(f"task {index} cannot be made")
        if request_id not in self.by_request:
            self.created.append((split, index, seed))
            self.by_request[request_id] = f"e{len(self.created)}"
            self.open[self.by_request[request_id]] = 0
        episode_id = self.by_request[request_id]
        await asyncio.sleep(self.delay_s)
        messages: list[Message] = [{"role": "user", "content": self.prompt}]
        return Opening(episode_id, f"{split}/{index}", messages, scored_at_end=self.end is not None)

    async def step(self, episode_id: str, request_id: str, content: str) -> StepReply:
        await asyncio.sleep(self.delay_s)
        if self.step_failures:
            raise self.step_failures.pop(0)
        if episode_id not in self.open:
            raise NotFound(f"there is no episode {episode_id}")
        self.texts.append(content)
        if self.respond is not None:
            return self.respond(content)
        self.open[episode_id] += 1
        over = self.open[episode_id] >= self.n_turns
        return StepReply(
            [] if over else [{"role": "user", "content": self.reply}], 1.0, over, False, over, {"turn": 1.0}
        )

    async def finish(self, episode_id: str, request_id: str) -> StepReply:
        assert self.end is not None
        return self.end

    async def delete_episode(self, episode_id: str) -> None:
        self.open.pop(episode_id, None)

    async def ready(self) -> None:
        if self.not_ready:
            self.not_ready -= 1
            raise ServiceUnreachable("env is starting")

    async def num_tasks(self, env: str, split: str) -> int:
        return self.n_tasks


@dataclass
class MemoryQueue:
    """Tickets in memory, as the producer sees them. `away` counts calls that fail as if Redis were gone."""

    published: dict[int, bytes] = field(default_factory=dict)
    given_back: list[int] = field(default_factory=list)
    renewed: list[int] = field(default_factory=list)
    issued: int = 0
    limit: int = 4
    void: int = 0
    version: int = 0
    depth: int = 0
    epoch: int = 1
    ready: bool = True
    away: int = 0
    answers: list[Published] = field(default_factory=list)

    async def reserve_wait(
        self,
        ttl_s: float,
        batch: int,
        max_staleness: int,
        total: int,
        deadline_s: float,
        ahead: int | None = None,
    ) -> Reservation | PublishRefusal:
        await self._reach()
        if not self.ready:
            await asyncio.sleep(0.01)
            return PublishRefusal.NOT_READY
        if self.given_back:
            return Reservation(self.given_back.pop(0), self.version)
        if self.issued - self.void >= total:
            await asyncio.sleep(0.01)
            return PublishRefusal.EXHAUSTED
        if self.issued >= self.limit:
            await asyncio.sleep(0.01)
            return PublishRefusal.FULL
        self.issued += 1
        return Reservation(self.issued, self.version)

    async def renew(self, ticket: int, ttl_s: float) -> bool:
        await self._reach()
        (self.renewed if ttl_s else self.given_back).append(ticket)
        return True

    async def publish(self, ticket: int, payload: bytes) -> Published:
        await self._reach()
        if self.answers:
            return self.answers.pop(0)
        if ticket in self.published:
            return Published.DUPLICATE
        self.published[ticket] = payload
        return Published.QUEUED

    async def state(self) -> QueueState:
        await self._reach()
        zeros = dict.fromkeys(("low", "done", "dead", "reissued", "duplicates", "strays"), 0)
        return QueueState(
            issued=self.issued,
            version=self.version,
            depth=self.depth,
            epoch=self.epoch,
            ready=self.ready,
            void=self.void,
            leased=len(self.given_back),
            **zeros,
        )

    async def _reach(self) -> None:
        await asyncio.sleep(0)
        if self.away:
            self.away -= 1
            raise QueueUnavailable("Redis did not answer")


def balancer_of(*engines: ScriptedEngine, max_staleness: int = 1) -> Balancer:
    """A balancer whose servers have been probed already."""
    balancer = Balancer(max_staleness)
    for i, engine in enumerate(engines):
        balancer.add(ServerLoad(f"http://engine{i}", engine, version=engine.version))
    return balancer


async def with_probes[T](balancer: Balancer, work: Awaitable[T], version: WeightVersion = V0) -> T:
    """Await `work` while all servers pass their probes, with weights of `version`."""
    probing = asyncio.ensure_future(_probed(balancer, version))
    try:
        return await work
    finally:
        probing.cancel()


async def _probed(balancer: Balancer, version: WeightVersion) -> None:
    while True:
        for server in balancer.servers:
            balancer.observe(server, version)
        await asyncio.sleep(0.005)


def runner_of(env: ScriptedEnv, balancer: Balancer, bounds: TokenBounds = BOUNDS) -> EpisodeRunner:
    return EpisodeRunner(tiny_tokenizer(), env, balancer, RunStatus(), bounds)


def dispatcher_of(
    env: ScriptedEnv, balancer: Balancer, bounds: TokenBounds = BOUNDS, max_concurrent: int = 64
) -> Dispatcher:
    return Dispatcher(
        runner_of(env, balancer, bounds),
        balancer,
        RunStatus(),
        slots=Slots(max_concurrent),
        max_attempts=bounds.max_attempts,
    )


def spec(ticket: int = 1, sample_index: int = 0, need: VersionBounds | None = None, seed: int = 7) -> SamplingSpec:
    return SamplingSpec("demo", "train", 3, ticket, sample_index, seed, SAMPLING, need or VersionBounds())


def plan(group_size: int = 4, n_tasks: int = 10) -> GroupPlan:
    async def task_of(ticket: int) -> TicketTask:
        return TicketTask("demo", TaskOrder(7, n_tasks).index(ticket))

    return GroupPlan("train", group_size, 7, SAMPLING, task_of)


def unreachable(n: int = 1) -> list[VolleyError]:
    return [ServiceUnreachable("gone") for _ in range(n)]
