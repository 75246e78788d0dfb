"""Partial rollouts: episodes go on from their tokens after a stop or the death of the orchestrator."""

import asyncio
import sqlite3
from dataclasses import replace

import numpy as np
import pytest

from services.orchestrator.episodes.context import EpisodeContext
from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.groups import run_group
from services.orchestrator.episodes.partials import TABLE, PartialRollouts
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.reservations import Admission
from services.orchestrator.schedule.ticket_loop import TicketLoop
from services.orchestrator.servers.balancer import VersionBounds
from services.orchestrator.servers.slots import Slots
from services.orchestrator.status import RunStatus
from shared.clients.rollout import Generation
from shared.errors import StorageUnavailable
from shared.types import Group, VersionSpan, WeightVersion
from tests.orchestrator.fakes import BOUNDS, MemoryQueue, ScriptedEngine, ScriptedEnv, balancer_of, plan, spec
from tests.support.tokenizer import tiny_tokenizer

NEED = VersionBounds(0)
TERMS = Admission(batch=2, max_staleness=1, total=100, lease_s=60, patience_s=5.0)


class MemoryStore:
    """The database's rows outlive the process; `fails` refuses writes."""

    def __init__(self):
        self.db, self.fails = sqlite3.connect(":memory:", isolation_level=None), False
        self.db.execute(TABLE)

    async def write(self, *statements):
        await asyncio.sleep(0)
        if self.fails:
            raise StorageUnavailable("disk full")
        for sql, values in statements:
            self.db.execute(sql, values)

    async def run(self, work):
        if self.fails:
            raise StorageUnavailable("the file is damaged")
        return work(self.db)

    def turns(self):
        return self.db.execute("SELECT ticket, sample, turn FROM partials").fetchall()


class RememberingEnv(ScriptedEnv):
    """Answers a repeated request as before, as the environment service does; waits before the turn `held_at`."""

    def __init__(self, held_at=0, **kwargs):
        super().__init__(**kwargs)
        self.answers, self.held_at, self.go = {}, held_at, asyncio.Event()

    async def step(self, episode_id, request_id, content):
        if request_id.endswith(f"-{self.held_at}"):
            await self.go.wait()
        if (episode_id, request_id) not in self.answers:
            self.answers[episode_id, request_id] = await super().step(episode_id, request_id, content)
        return self.answers[episode_id, request_id]


class CuttingEngine(ScriptedEngine):
    """Answers slowly, and with half of its tokens if it is aborted."""

    def __init__(self, slow=True, **kwargs):
        super().__init__(**kwargs)
        self.slow, self.cut = slow, asyncio.Event()

    async def generate(self, input_ids, sampling, rid, **kwargs):
        whole = await super().generate(input_ids, sampling, rid, **kwargs)
        if not self.slow:
            return whole
        await self.cut.wait()
        n = len(whole.output_ids) // 2
        spans = (VersionSpan(whole.versions[0].version, 0, n),) if n else ()
        return Generation(whole.output_ids[:n], whole.logprobs[:n], spans, "abort")

    async def abort(self, rid):
        self.cut.set()


class Process:
    """One life of the orchestrator."""

    def __init__(self, store, env, engine, max_staleness=1):
        self.partials = PartialRollouts(store)
        self.store, self.env, self.engine = store, env, engine
        self.balancer = balancer_of(engine, max_staleness=max_staleness)
        status = RunStatus()
        runner = EpisodeRunner(tiny_tokenizer(), env, self.balancer, status, BOUNDS, partials=self.partials)
        self.dispatcher = Dispatcher(runner, self.balancer, status, slots=Slots(64), max_attempts=3)

    async def begin(self, run_id="first", low=0):
        await self.partials.begin(run_id, low)
        return self

    def loop(self, queue):
        gate = ReservationGate()
        gate.release(ReservationGate.START)

        async def run(ticket, need):
            return await run_group(self.dispatcher, plan(2), ticket, need)

        return TicketLoop(queue, gate, RunStatus(), TERMS, n_groups=2, run_group=run, partials=self.partials)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def calm(n_turns=4, ticket=1):
    process = await Process(MemoryStore(), RememberingEnv(n_turns=n_turns), ScriptedEngine()).begin()
    return await run_group(process.dispatcher, plan(3), ticket, NEED), process.engine


def same(a: Group, b: Group) -> None:
    for one, other in zip(a.trajectories, b.trajectories, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
        assert (one.versions, one.turns, one.reward) == (other.versions, other.turns, other.reward)


async def died(store, env, engine):
    """Run a process until all episodes wait for turn 3, and leave it there, as a SIGKILL does."""
    process = await Process(store, env, engine).begin()
    task = asyncio.ensure_future(run_group(process.dispatcher, plan(3), 1, NEED))
    await until(lambda: len([row for row in store.turns() if row[2] == 3]) == 3)
    return task


@pytest.mark.parametrize("is_env_lost", [False, True])
async def test_after_a_kill_no_stored_turn_is_sampled_again(is_env_lost):
    store, env = MemoryStore(), RememberingEnv(n_turns=4, held_at=3)
    killed = await died(store, env, ScriptedEngine())
    env = RememberingEnv(n_turns=4) if is_env_lost else env
    env.held_at = 0
    process = await Process(store, env, ScriptedEngine()).begin()
    group = await run_group(process.dispatcher, plan(3), 1, NEED)
    expected, _ = await calm()
    same(group, expected)
    assert len(process.engine.prompts) == 3
    assert len(env.created) == 3
    killed.cancel()


async def test_an_episode_for_a_privileged_teacher_is_played_again_from_its_turns() -> None:
    """A stored episode lacks the texts for the teacher, which the environment gives again in the repeated turns."""
    store, env = MemoryStore(), RememberingEnv(n_turns=2)
    for context in (EpisodeContext(), EpisodeContext()):
        process = await Process(store, env, ScriptedEngine()).begin()
        await process.dispatcher.episode(replace(spec(), context=context), "train")
        assert (len(context.answers), len(context.prompts)) == (2, 1)
    assert [turn for _, _, turn in store.turns()] == [1, 2]
    assert not process.engine.prompts, "its turns were sampled again"


async def test_a_clean_stop_keeps_the_tokens_of_the_turn_that_it_cuts():
    store, queue, env = MemoryStore(), MemoryQueue(limit=1), RememberingEnv(n_turns=2)
    first = await Process(store, env, CuttingEngine()).begin()
    task = asyncio.ensure_future(first.loop(queue).run())
    await until(lambda: len(first.engine.prompts) == 2)
    task.cancel()
    await asyncio.wait([task])
    assert (queue.given_back, len(env.open)) == ([1], 2)
    second = await Process(store, env, ScriptedEngine(version=WeightVersion(1, 1))).begin()
    second.balancer.set_target(WeightVersion(1, 1), ((1, 0),))
    task = asyncio.ensure_future(second.loop(queue).run())
    await until(lambda: queue.published)
    task.cancel()
    await asyncio.wait([task])
    group = Group.decode(queue.published[1])
    kept = {len(ids) // 2 for ids in first.engine.outputs if len(ids) > 1}
    for trajectory in group.trajectories:
        versions = [span.version for span in trajectory.versions]
        assert versions[-1] == "e000001-s000001"
        assert versions.count("e000001-s000000") <= 1
    old = [s.end - s.start for t in group.trajectories for s in t.versions if s.version == "e000001-s000000"]
    assert old
    assert set(old) <= kept
    assert len(env.created) == 2
    assert not env.open
    assert store.turns() == []


async def test_a_finished_episode_of_an_unfinished_group_is_not_played_again():
    store, env = MemoryStore(), RememberingEnv(n_turns=2)
    process = await Process(store, env, ScriptedEngine()).begin()
    done = await process.dispatcher.episode(spec(1, 0), "train")
    again = await Process(store, env, ScriptedEngine()).begin()
    assert (await again.dispatcher.episode(spec(1, 0), "train")).token_ids.tolist() == done.token_ids.tolist()
    assert again.engine.prompts == []
    await again.dispatcher.episode(spec(1, 1), "train")
    assert len(again.engine.prompts) == 2


async def test_tokens_of_undone_weights_are_sampled_again():
    store, env = MemoryStore(), RememberingEnv(n_turns=4, held_at=3)
    killed = await died(store, env, ScriptedEngine())
    env.held_at = 0
    process = await Process(store, env, ScriptedEngine(version=WeightVersion(2, 0))).begin()
    process.balancer.set_target(WeightVersion(2, 0), ((2, 0),))
    group = await run_group(process.dispatcher, plan(3), 1, NEED)
    assert {span.version for t in group.trajectories for span in t.versions} == {"e000002-s000000"}
    killed.cancel()


@pytest.mark.parametrize("change", ["run_id", "low", "damage", "task"])
async def test_a_record_that_is_not_of_this_sample_is_not_used(change):
    store, env = MemoryStore(), RememberingEnv(n_turns=4, held_at=3)
    killed = await died(store, env, ScriptedEngine())
    if change == "damage":
        store.db.execute("UPDATE partials SET record = x'c1'")
    process = Process(store, RememberingEnv(n_turns=4), ScriptedEngine())
    await process.begin("second" if change == "run_id" else "first", low=1 if change == "low" else 0)
    made = replace(spec(1, 0), index=1) if change == "task" else spec(1, 0)
    trajectory = await process.dispatcher.episode(made, "train")
    assert len(process.engine.prompts) == 4
    trajectory.validate()
    killed.cancel()


async def test_a_full_disk_costs_only_the_record():
    store = MemoryStore()
    store.fails = True
    process = await Process(store, RememberingEnv(n_turns=2), ScriptedEngine()).begin()
    trajectory = await process.dispatcher.episode(spec(), "train")
    assert np.array_equal(trajectory.loss_mask.astype(bool), trajectory.logprobs != 0)


async def test_evaluations_are_not_stored():
    store = MemoryStore()
    process = await Process(store, RememberingEnv(n_turns=2), ScriptedEngine()).begin()
    await process.dispatcher.episode(replace(spec(0, 0), split="eval"), "eval")
    assert store.turns() == []
