"""A run whose trainer goes back to an older checkpoint: nothing waits for weights that were undone."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from services.orchestrator.episodes.groups import run_group
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.evaluation.evaluator import EvalPlan, Evaluator
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.run_schedule import RunSchedule
from services.orchestrator.schedule.ticket_loop import Admission, TicketLoop
from services.orchestrator.status import RunStatus
from shared.errors import VolleyError
from shared.types import Group, WeightVersion
from tests.orchestrator.fakes import MemoryQueue, ScriptedEngine, ScriptedEnv, balancer_of, dispatcher_of, plan
from tests.support.tokenizer import tiny_tokenizer

HOURS = TokenBounds(context_length=256, max_response_length=16, max_turns=4, timeout_s=7200.0, max_attempts=3)
TERMS = Admission(batch=2, max_staleness=0, total=100, lease_s=60, patience_s=7200.0)
PLAN = EvalPlan("demo", 3, 7, every=5, last_step=20)


class RunUnderTest:
    """A schedule over fakes; `serve` is a rollout server that has just been probed, with these weights."""

    def __init__(self, folder, queue, max_steps=20, beside=False):
        self.queue, self.status, gate = queue, RunStatus(), ReservationGate()
        self.balancer = balancer_of(ScriptedEngine(version=None), max_staleness=0)
        dispatcher = dispatcher_of(ScriptedEnv(n_turns=1), self.balancer, HOURS)
        self.evaluator = Evaluator(dispatcher, self.status, tiny_tokenizer(), PLAN, folder)
        self.loop = loop = TicketLoop(
            queue,
            gate,
            self.status,
            TERMS,
            n_groups=2,
            run_group=lambda ticket, need: run_group(dispatcher, plan(2), ticket, need),
        )
        parts = (queue, self.balancer, self.status, gate, loop, self.evaluator)
        self.schedule = RunSchedule(*parts, max_steps=max_steps, begun=self._begun, generates_during_evaluation=beside)
        self.beginnings = []

    async def _begun(self, beginning):
        self.beginnings.append(beginning)

    def serve(self, epoch, step):
        (server,) = self.balancer.servers
        server.engine.version = WeightVersion(epoch, step)
        self.balancer.observe(server, server.engine.version)

    def go_back(self, epoch, step):
        self.queue.epoch, self.queue.version = epoch, step
        self.serve(epoch, step)


@asynccontextmanager
async def following(run):
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        task = group.create_task(run.schedule.follow())
        yield run
        task.cancel()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def test_a_ticket_stops_waiting_for_weights_that_were_undone(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=4, limit=1))
    run.serve(1, 3)
    async with following(run):
        await until(lambda: run.queue.issued == 1 and "step 4 is needed" in (run.balancer.why_none() or ""))
        run.go_back(2, 3)
        await until(lambda: 1 in run.queue.published)
    group = Group.decode(run.queue.published[1])
    assert group.failure is None
    assert group.oldest() == WeightVersion(2, 3)


async def test_an_evaluation_of_undone_weights_ends_and_its_step_is_measured_when_it_is_made_again(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=5, limit=0))
    run.serve(1, 4)
    async with following(run):
        await until(lambda: run.status.evaluating_step == 5)
        run.go_back(2, 3)
        await until(lambda: run.status.evaluating_step is None)
        assert run.evaluator.records == []
        run.go_back(2, 5)
        await until(lambda: run.evaluator.records)
    (record,) = run.evaluator.records
    assert (record.step, record.version_min) == (5, "e000002-s000005")


async def test_weights_that_are_left_behind_are_not_measured_but_the_newer_ones(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=5, limit=0))
    run.serve(1, 4)
    async with following(run):
        await until(lambda: run.status.evaluating_step == 5)
        run.queue.version = 6
        run.serve(1, 6)
        await until(lambda: run.evaluator.records)
    assert [(record.step, record.version_max) for record in run.evaluator.records] == [(6, "e000001-s000006")]


async def test_no_ticket_is_taken_beyond_the_step_that_is_measured_next(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=4, limit=100))
    run.serve(1, 4)
    async with following(run):
        await until(lambda: run.queue.issued == 5 * TERMS.batch)
        await until(lambda: run.status.waiting is not None and "are measured before" in run.status.waiting.why)
        assert run.queue.issued == 5 * TERMS.batch
        run.queue.version = 5
        run.serve(1, 5)
        await until(lambda: run.queue.issued == 10 * TERMS.batch)
    assert [record.step for record in run.evaluator.records] == [5]


async def test_the_run_ends_only_when_the_last_step_of_the_present_lineage_is_measured(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=20, limit=0))
    run.serve(1, 19)
    async with following(run):
        await until(lambda: run.status.evaluating_step == 20)
        run.go_back(2, 18)
        await until(lambda: run.status.evaluating_step != 20)
        run.go_back(2, 20)
        await until(lambda: run.evaluator.records)
    assert run.evaluator.records[-1].version_min == "e000002-s000020"


async def test_an_evaluation_without_a_single_episode_fails_the_run(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=0, limit=0))
    (server,) = run.balancer.servers
    server.engine.failures += [VolleyError("a defect")] * 99
    run.serve(1, 0)
    keep = asyncio.ensure_future(keep_well(run))
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(60):
            await run.schedule.follow()
    keep.cancel()
    assert caught.group_contains(VolleyError, match="all 3 held-out tasks failed", depth=2)


async def keep_well(run):
    while True:
        run.serve(1, 0)
        await asyncio.sleep(0.01)
