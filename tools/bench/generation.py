"""Compare policies of generation on simulated servers.

The orchestrator's own parts (ticket loop, policy, runner, balancer, slots) run in simulated time against servers whose
answers have lognormal lengths: 99 % lie within a ratio of 100:1. Every mode samples the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.groups import GroupPlan, run_group
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.policy import policy_of
from services.orchestrator.schedule.reservations import Admission
from services.orchestrator.schedule.ticket_loop import TicketLoop
from services.orchestrator.servers.balancer import Balancer, ServerLoad, VersionBounds
from services.orchestrator.servers.slots import Slots
from services.orchestrator.status import RunStatus
from shared.generation_schema import GenerationSection, round_size, started_ahead
from shared.models.chat import ChatTokenizer
from shared.run.seeding import TaskOrder, TicketTask
from shared.types import Group, WeightVersion
from tools.bench.result import BenchResult, emit
from tools.bench.simulation import (
    SimulatedEnv,
    SimulatedServer,
    SimulatedTrainer,
    balancer_of,
    simulate,
)
from volley_algorithms.generation.concurrency import AdaptiveConcurrency

_MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny"
_SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
_HOURS = 1e6
_DRAIN_S, _AWAY_S = 5.0, 30.0


@dataclass(frozen=True)
class Study:
    """One simulated run. `discards`: the end of a step stops its other groups and throws them away, as in slime."""

    n_servers: int = 4
    slots: int = 32
    group_size: int = 8
    groups_per_step: int = 16
    n_steps: int = 6
    n_turns: int = 4
    mean_tokens: float = 60.0
    max_staleness: int = 2
    max_concurrent: int = 100_000
    env_s: float = 0.0
    cache_tokens: int = 10**9
    context_scale: int = 1
    n_kills: int = 0
    preempted_every_s: float | None = None
    discards: bool = False
    generation: GenerationSection = field(default_factory=GenerationSection)


@dataclass(frozen=True)
class Outcome:
    """Result: `efficiency` is the share of the servers' slots that were busy with tokens that were not thrown away."""

    wall_s: float
    efficiency: float
    sampled_per_trained: float
    ends: Mapping[str, int]
    limit: int


def run(study: Study) -> Outcome:
    """Simulate a run until its last step is trained."""
    return simulate(_run(study))


async def _run(study: Study) -> Outcome:
    servers = [
        SimulatedServer(study.slots, study.mean_tokens, study.cache_tokens, study.context_scale)
        for _ in range(study.n_servers)
    ]
    balancer = balancer_of(servers, study.max_staleness)
    slots, status = Slots(study.max_concurrent), RunStatus(asyncio.get_running_loop().time)
    bounds = TokenBounds(10**6, 10**5, study.n_turns + 1, _HOURS, 20)
    env = SimulatedEnv(study.n_turns, study.env_s)
    runner = EpisodeRunner(ChatTokenizer(_MODEL), env, balancer, status, bounds)
    dispatcher = Dispatcher(runner, balancer, status, slots=slots, max_attempts=20)
    trainer = SimulatedTrainer(study.groups_per_step, study.max_staleness, balancer, servers)
    limit = slots.limit
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(_killing(study.n_kills, balancer, servers))]
        if study.preempted_every_s is not None:
            others.append(tasks.create_task(_preempting(study.preempted_every_s, balancer, servers)))
        if study.generation.concurrency == "adaptive":
            others.append(tasks.create_task(_adapting(AdaptiveConcurrency(slots, study.group_size), servers)))
        for steps in range(1, study.n_steps + 1) if study.discards else [study.n_steps]:
            loop = _ticket_loop(study, trainer, dispatcher, status)
            running = [tasks.create_task(loop.run()), tasks.create_task(_noticing(loop, trainer))]
            await trainer.train(steps)
            limit = slots.limit
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            if study.discards:
                trainer.discard()
        for task in others:
            task.cancel()
    return _outcome(study, trainer, servers, limit)


def _outcome(study: Study, trainer: SimulatedTrainer, servers: list[SimulatedServer], limit: int) -> Outcome:
    wall_s, trained = asyncio.get_running_loop().time(), trainer.trained_tokens
    sampled = sum(server.sampled for server in servers) if study.discards else trained + trainer.wasted_tokens
    busy = sum(server.busy_s for server in servers) / (wall_s * study.n_servers * study.slots)
    return Outcome(wall_s, busy * trained / sampled, sampled / trained, trainer.ends, limit)


def _ticket_loop(study: Study, queue: SimulatedTrainer, dispatcher: Dispatcher, status: RunStatus) -> TicketLoop:
    generation, batch = study.generation, study.groups_per_step
    policy, gate = policy_of(generation, batch, study.group_size, mask_truncated=False), ReservationGate()
    gate.release(ReservationGate.START)
    order = TaskOrder(7, 100_000)

    async def task_of(ticket: int) -> TicketTask:
        return TicketTask("simulated", order.index(ticket))

    plan = GroupPlan("train", study.group_size, 7, _SAMPLING, task_of)

    async def generate(ticket: int, need: VersionBounds) -> Group:
        async def void(why: str) -> Group:
            return plan.void(await task_of(ticket), ticket, why, "straggler")

        return await policy.generate(ticket, lambda barrier: run_group(dispatcher, plan, ticket, need, barrier), void)

    factor = generation.over_sampling_factor
    ahead = None if factor is None else started_ahead(factor, batch)
    terms = Admission(batch, study.max_staleness, 10**9, _HOURS, _HOURS, ahead)
    n_groups = max(1, study.max_concurrent // study.group_size)
    if generation.mode == "turn_synchronous":
        n_groups = round_size(generation, batch)
    return TicketLoop(queue, gate, status, terms, n_groups=n_groups, run_group=generate, policy=policy)


async def _killing(n: int, balancer: Balancer, servers: list[SimulatedServer]) -> None:
    """Kill a server every two seconds, one after the other; each is away for one second."""
    for number in range(n):
        await asyncio.sleep(1.0)
        load, server = balancer.servers[number % len(servers)], servers[number % len(servers)]
        server.kill()
        balancer.fail(load, "killed")
        await asyncio.sleep(1.0)
        balancer.observe(load, WeightVersion.parse(server.versions[-1][1]))


async def _preempting(every_s: float, balancer: Balancer, servers: list[SimulatedServer]) -> None:
    """Take a server away at intervals; each comes back, with an empty cache, after `_AWAY_S`.

    As on SIGTERM, its requests may go on for `_DRAIN_S`, but no new one comes; then they end with their tokens.
    """

    async def preempt(load: ServerLoad, server: SimulatedServer) -> None:
        balancer.fail(load, "the server is stopping")
        await asyncio.sleep(_DRAIN_S)
        server.drain()
        await asyncio.sleep(_AWAY_S - _DRAIN_S)
        balancer.observe(load, WeightVersion.parse(server.versions[-1][1]))

    async with asyncio.TaskGroup() as running:
        for number in count():
            await asyncio.sleep(every_s)
            running.create_task(preempt(balancer.servers[number % len(servers)], servers[number % len(servers)]))


async def _adapting(concurrency: AdaptiveConcurrency, servers: list[SimulatedServer]) -> None:
    while True:
        concurrency.observe([await server.load() for server in servers])
        await asyncio.sleep(1.0)


async def _noticing(loop: TicketLoop, trainer: SimulatedTrainer) -> None:
    while True:
        loop.update_queue_state(await trainer.state(), loop.leased)
        await asyncio.sleep(0.25)


def main() -> None:
    """Print the results; figures of the whole table are in docs/measurements.md."""
    synchronous = Study(max_staleness=0, generation=GenerationSection(mode="turn_synchronous"))
    asynchronous = Study(max_staleness=4, max_concurrent=384)
    slow, fast = run(synchronous), run(asynchronous)
    kept = replace(asynchronous, generation=GenerationSection(over_sampling_factor=1.5))
    thrown_away = replace(kept, max_staleness=1, discards=True)
    agents = Study(2, 16, groups_per_step=8, max_staleness=4, max_concurrent=256, env_s=1.2)
    agents = replace(agents, cache_tokens=1_200_000, context_scale=100)
    fixed, adaptive = run(agents), run(replace(agents, generation=GenerationSection(concurrency="adaptive")))
    emit(
        {
            "asynchronous, simulated seconds": BenchResult(fast.wall_s, "s", slow.wall_s),
            "asynchronous, efficiency": BenchResult(fast.efficiency, "share of slots", slow.efficiency),
            "surplus kept, tokens sampled": BenchResult(
                run(kept).sampled_per_trained, "per token trained", run(thrown_away).sampled_per_trained
            ),
            "adaptive concurrency": BenchResult(adaptive.wall_s, "s", fixed.wall_s),
        }
    )


if __name__ == "__main__":
    main()
