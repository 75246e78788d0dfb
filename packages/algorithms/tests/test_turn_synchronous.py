"""The turn-synchronous mode: episodes of a round advance together, end early, and never wait for ever."""

import asyncio
from dataclasses import replace

import pytest

from services.orchestrator.episodes.groups import run_group
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.reservations import Admission, RoundAdmission
from services.orchestrator.schedule.ticket_loop import TicketLoop
from services.orchestrator.servers.balancer import VersionBounds
from services.orchestrator.status import RunStatus
from shared.clients.env import StepReply
from shared.errors import NotFound
from shared.generation_schema import GenerationFilters, GenerationSection, defeated
from shared.queue.records import QueueState
from shared.types import Group
from tests.orchestrator.fakes import MemoryQueue, ScriptedEngine, ScriptedEnv, balancer_of, dispatcher_of, plan
from tests.orchestrator.test_ticket_loop import run_until
from volley_algorithms.generation.lockstep import EpisodeBarrier
from volley_algorithms.generation.policy import ConfiguredPolicy

TERMS = Admission(batch=3, max_staleness=0, total=100, lease_s=60, patience_s=5.0)
SYNCHRONOUS = GenerationSection(mode="turn_synchronous")
FILTERED = GenerationSection(mode="turn_synchronous", filters=GenerationFilters(rollout_filter_ratio=0.25))


class UnequalEnv(ScriptedEnv):
    """Episodes of one to four turns, by their number; notes the turn of every step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.turns = []

    async def step(self, episode_id, request_id, content):
        turn, number = int(request_id.rpartition("-")[2]), int(episode_id[1:])
        await asyncio.sleep(0.001 * (number % 3))
        self.turns.append(turn)
        over = turn > number % 4
        return StepReply([] if over else [{"role": "user", "content": "next"}], 1.0, over, False, over)


def loop_of(queue, env, engine, generation=SYNCHRONOUS, n_groups=3):
    gate, dispatcher = ReservationGate(), dispatcher_of(env, balancer_of(engine))
    gate.release(ReservationGate.START)
    policy = ConfiguredPolicy(generation, TERMS.batch, 2)

    async def run(ticket, need):
        return await policy.generate(
            ticket, lambda barrier: run_group(dispatcher, plan(2), ticket, need, barrier), pytest.fail
        )

    return TicketLoop(queue, gate, RunStatus(), TERMS, n_groups=n_groups, run_group=run, policy=policy)


async def test_every_turn_is_sampled_for_all_before_the_next_and_ended_episodes_are_not_waited_for():
    queue, env = MemoryQueue(limit=6), UnequalEnv()
    await run_until(loop_of(queue, env, ScriptedEngine()), lambda: len(queue.published) == 6)
    lengths = [[1 + n % 4 for n in part] for part in (range(1, 7), range(7, 13))]
    assert len(env.turns) == sum(map(sum, lengths))
    n_first = sum(lengths[0])
    for turns in (env.turns[:n_first], env.turns[n_first:]):
        assert turns == sorted(turns)
    assert not env.open


async def test_the_same_samples_as_the_asynchronous_mode():
    """Every token is seeded by ticket, sample and position, so the mode decides only when it is sampled."""
    made = []
    for generation in (SYNCHRONOUS, GenerationSection()):
        queue, env, engine = MemoryQueue(limit=3), ScriptedEnv(n_turns=3), ScriptedEngine()
        await run_until(loop_of(queue, env, engine, generation), lambda q=queue: len(q.published) == 3)
        groups = [Group.decode(queue.published[ticket]) for ticket in (1, 2, 3)]
        made.append([[e.token_ids.tolist() for e in g.trajectories] for g in groups])
    assert made[0] == made[1]


async def test_a_repeated_attempt_and_a_failed_group_hold_nobody_up():
    queue = MemoryQueue(limit=3)
    env = ScriptedEnv(n_turns=3, step_failures=[NotFound("restarted")], broken=set())
    await run_until(loop_of(queue, env, ScriptedEngine()), lambda: len(queue.published) == 3)
    groups = [Group.decode(data) for data in queue.published.values()]
    assert [g.failure for g in groups] == [None] * 3
    assert [dict(e.failures) for g in groups for e in g.trajectories if e.failures] == [{"EpisodeLost": 1}]


async def test_a_round_is_as_large_as_the_tickets_that_can_be_had():
    queue = MemoryQueue(limit=4)
    await run_until(loop_of(queue, ScriptedEnv(), ScriptedEngine()), lambda: len(queue.published) == 4)
    assert queue.given_back == []


async def test_a_cancelled_episode_is_not_waited_for():
    barrier, passed = EpisodeBarrier(3), []

    async def one(name):
        try:
            await barrier.turn()
            passed.append(name)
        finally:
            barrier.leave()

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(one("gone"))
        tasks.create_task(one("a"))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        assert passed == []
        tasks.create_task(one("b"))
    assert sorted(passed) == ["a", "b"]


def test_a_round_that_cannot_run_at_once_is_refused_with_the_key():
    assert "orchestrator.max_concurrent_episodes" in (defeated(SYNCHRONOUS, 8, 1, 7) or "")
    assert defeated(SYNCHRONOUS, 8, 1, 8) is None


def filtering_loop(queue, rounds, engine):
    """Loop of rounds of 4 groups, of which one is kept; `rounds` gets (ticket, wanted step, step)."""
    terms = Admission(batch=1, max_staleness=3, total=5, lease_s=60, patience_s=5.0, round=4)
    gate, dispatcher = ReservationGate(), dispatcher_of(UnequalEnv(), balancer_of(engine))
    gate.release(ReservationGate.START)
    policy = ConfiguredPolicy(FILTERED, 1, 2)

    async def run(ticket, need):
        rounds.append((ticket, need.min_step, queue.version))
        return await policy.generate(
            ticket,
            lambda barrier: run_group(dispatcher, plan(2), ticket, VersionBounds(min_step=0), barrier),
            pytest.fail,
        )

    return TicketLoop(queue, gate, RunStatus(), terms, n_groups=4, run_group=run, policy=policy)


async def train(queue):
    seen = set()
    while True:
        for ticket in sorted(queue.published.keys() - seen):
            seen.add(ticket)
            if Group.decode(queue.published[ticket]).rule is not None:
                queue.void += 1
            else:
                await asyncio.sleep(0.02)
                queue.version += 1
        await asyncio.sleep(0.001)


async def test_a_filtered_round_is_whole_and_starts_when_the_trainer_lacks_groups():
    """Like GRL's: 4 groups are sampled by one version, one of them is trained, and makes the next version."""
    queue, rounds = MemoryQueue(limit=10**6), []
    async with asyncio.TaskGroup() as tasks:
        training = tasks.create_task(train(queue))
        await run_until(filtering_loop(queue, rounds, ScriptedEngine()), lambda: queue.version == 5)
        training.cancel()
    assert [step for _, step, _ in rounds] == [version for _, _, version in rounds]
    assert [version for _, _, version in rounds[:20]] == [version for version in range(5) for _ in range(4)]


async def test_another_orchestrator_plays_the_round_that_was_interrupted():
    queue, rounds = MemoryQueue(limit=10**6), []
    async with asyncio.TaskGroup() as tasks:
        training = tasks.create_task(train(queue))
        await run_until(filtering_loop(queue, rounds, ScriptedEngine(delay_s=0.02)), lambda: len(rounds) >= 7)
        assert queue.given_back
        await run_until(filtering_loop(queue, rounds, ScriptedEngine()), lambda: queue.version == 5)
        training.cancel()
    assert queue.issued - queue.void == 5


def test_a_round_admits_its_surplus_only_for_a_step_of_the_run_that_has_no_group_yet():
    rounds = RoundAdmission(16, 4)
    state = QueueState(20, 0, 4, 1, True, 4, 0, 0, 0, 0, 0, 0, 0)
    assert rounds.open(state)
    assert [rounds.surplus(total) for total in (20, 19)] == [12, 0]
    assert not rounds.open(replace(state, issued=24))
    assert rounds.open(replace(state, issued=23))
    assert rounds.surplus(20) == 0
    assert rounds.open(replace(state, issued=36, leased=16))  # an orchestrator has died in the middle of a round
