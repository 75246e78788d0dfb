"""A run whose trainer goes back to an older checkpoint: nothing waits for weights that were undone."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from services.orchestrator.episodes.groups import run_group
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.evaluation.evaluator import EvalPlan, Evaluator
from services.orchestrator.evaluation.records import EvalRecord, append, as_rows
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.reservations import Admission
from services.orchestrator.schedule.run_schedule import RunSchedule
from services.orchestrator.schedule.ticket_loop import TicketLoop
from services.orchestrator.servers import holding
from services.orchestrator.servers.balancer import ServerLoad
from services.orchestrator.servers.holding import ServerHolds
from services.orchestrator.status import RunStatus
from shared.clients.rollout import RefusedWeights
from shared.errors import VolleyError, WeightsError
from shared.types import Group, WeightVersion
from tests.orchestrator.fakes import MemoryQueue, ScriptedEngine, ScriptedEnv, balancer_of, dispatcher_of, plan
from tests.support.tokenizer import tiny_tokenizer

HOURS = TokenBounds(context_length=256, max_response_length=16, max_turns=4, timeout_s=7200.0, max_attempts=3)
TERMS = Admission(batch=2, max_staleness=0, total=100, lease_s=60, patience_s=7200.0)
PLAN = EvalPlan("demo", 3, 7, every=5, last_step=20)
FIRST = [EvalRecord(0, "e000001-s000000", "e000001-s000000", 3, 0.0, 0.0, 1.0, 1, 0.1, 0, {})]


class RunUnderTest:
    """A schedule over fakes; `serve` is a rollout server that has just been probed, with these weights."""

    def __init__(self, folder, queue, max_steps=20, holds=False, measured=FIRST):
        self.queue, self.status, gate = queue, RunStatus(), ReservationGate()
        self.balancer = balancer_of(ScriptedEngine(version=None), max_staleness=0)
        dispatcher = dispatcher_of(ScriptedEnv(n_turns=1), self.balancer, HOURS)
        append(folder / "evals.jsonl", as_rows(measured))
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
        self.holds = ServerHolds(self.balancer, 0.5) if holds else None
        self.schedule = RunSchedule(*parts, max_steps=max_steps, on_epoch=self._begun, holds=self.holds)
        self.run_ids = []

    @property
    def records(self):
        return [record for record in self.evaluator.records if record.step >= 5]

    async def _begun(self, run_id):
        self.run_ids.append(run_id)

    def serve(self, epoch, step):
        server = self.balancer.servers[0]
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
        await until(lambda: run.queue.issued == 1 and "step 4 is needed" in (run.balancer.why_unroutable() or ""))
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
        assert run.records == []
        run.go_back(2, 5)
        await until(lambda: run.records)
    (record,) = run.records
    assert (record.step, record.version_min) == (5, "e000002-s000005")


async def test_weights_that_are_left_behind_are_not_measured_but_the_newer_ones(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=5, limit=0))
    run.serve(1, 4)
    async with following(run):
        await until(lambda: run.status.evaluating_step == 5)
        run.queue.version = 6
        run.serve(1, 6)
        await until(lambda: run.records)
    assert [(record.step, record.version_max) for record in run.records] == [(6, "e000001-s000006")]


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
    assert [record.step for record in run.records] == [5]


async def test_the_run_ends_only_when_the_last_step_of_the_present_lineage_is_measured(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=20, limit=0))
    run.serve(1, 19)
    async with following(run):
        await until(lambda: run.status.evaluating_step == 20)
        run.go_back(2, 18)
        await until(lambda: run.status.evaluating_step != 20)
        run.go_back(2, 20)
        await until(lambda: run.records)
    assert run.records[-1].version_min == "e000002-s000020"


async def test_an_evaluation_without_a_single_episode_fails_the_run(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=0, limit=0), measured=[])
    server = run.balancer.servers[0]
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


def refusing(run, step, epoch=1):
    """All servers of the run have step 3 and refuse a later one for good."""
    run.serve(1, 3)
    for server in run.balancer.servers:
        server.refused = RefusedWeights(WeightVersion(epoch, step), "lm_head is wrong")


async def test_a_run_whose_servers_all_refuse_the_newest_weights_fails_with_their_reason(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=4, limit=1))
    refusing(run, 4)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(60):
            await run.schedule.follow()
    assert caught.group_contains(WeightsError, match="engine0 refuses e000001-s000004 for good: lm_head is wrong")


@pytest.mark.parametrize("which", ["another server may load them", "older ones", "undone ones", "newer ones come"])
async def test_a_run_goes_on_while_refused_weights_need_not_stop_it(tmp_path, which):
    run = RunUnderTest(tmp_path, MemoryQueue(version=4, limit=1))
    if which == "another server may load them":
        run.balancer.add(ServerLoad("http://other", ScriptedEngine(version=None), out="it starts"))
    run.queue.depth = TERMS.batch if which == "newer ones come" else 0
    refusing(run, 3 if which == "older ones" else 4, epoch=0 if which == "undone ones" else 1)
    if which == "another server may load them":
        run.balancer.servers[1].refused = None
    async with following(run):
        await until(lambda: run.balancer.n_waiting)
        assert len(run.balancer.refusals()) == (which in ("another server may load them", "newer ones come"))
        run.queue.version, run.queue.depth = 5, 0
        run.serve(1, 5)
        await until(lambda: 1 in run.queue.published)


async def test_training_goes_on_during_an_evaluation(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=4, limit=100), holds=True)
    pinned, other = run.balancer.servers[0], ScriptedEngine(version=WeightVersion(1, 4))
    run.balancer.add(ServerLoad("http://other", other, version=other.version))
    run.serve(1, 4)
    async with following(run):
        await until(lambda: {11, 12} <= {*run.loop.leased})  # groups for a step after the one to be measured
        assert max(run.queue.published) == 5 * TERMS.batch
        pinned.engine.holds_greedy = True
        run.queue.version = 5
        run.serve(1, 5)
        await until(lambda: run.queue.published.keys() >= {11, 12})  # groups of step 6
        assert run.status.evaluating_step == 5
        assert pinned.engine.holders
        run.queue.version = 6
        other.version = WeightVersion(1, 6)
        run.balancer.observe(run.balancer.servers[1], other.version)
        await until(lambda: run.queue.published.keys() >= {13, 14})
        assert run.records == []
        pinned.engine.holds_greedy = False
        await until(lambda: run.records)
        await until(lambda: not pinned.engine.holders)
    (record,) = run.records
    assert (record.step, record.version_min, record.version_max) == (5, "e000001-s000005", "e000001-s000005")


async def test_training_waits_at_the_next_step_to_be_measured(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=5, limit=100), holds=True)
    run.balancer.servers[0].engine.delay_s = 0.05
    run.serve(1, 5)
    async with following(run):
        await until(lambda: run.records)
        await until(lambda: 10 * TERMS.batch in run.queue.published)
        await until(lambda: len(run.loop.leased) >= 2)
        await asyncio.sleep(0.3)
        assert max(run.queue.published) == 10 * TERMS.batch


async def test_a_void_group_before_an_evaluation_is_replaced(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=4, limit=100), holds=True)
    run.serve(1, 4)
    async with following(run):
        await until(lambda: 5 * TERMS.batch in run.queue.published)
        run.queue.void = 1
        await until(lambda: 5 * TERMS.batch + 1 in run.queue.published)


async def test_an_evaluation_ends_when_no_server_has_its_weights_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(holding, "_RENEW_S", 0.1)
    run = RunUnderTest(tmp_path, MemoryQueue(version=5, limit=0), holds=True)
    engine = run.balancer.servers[0].engine
    engine.holds_greedy = True
    run.serve(1, 5)
    async with following(run):
        await until(lambda: run.holds.any)
        run.queue.version = 6
        await asyncio.sleep(0.3)
        assert run.status.evaluating_step == 5
        run.serve(1, 6)  # its process was killed, and it has loaded the newest weights
        await until(lambda: run.status.evaluating_step == 6)
        engine.holds_greedy = False
        await until(lambda: run.records)
    assert [(record.step, record.version_max) for record in run.records] == [(6, "e000001-s000006")]


async def test_a_server_that_does_not_answer_is_held_until_its_lease_ends(tmp_path):
    balancer = balancer_of(ScriptedEngine(version=WeightVersion(1, 5)), ScriptedEngine(version=WeightVersion(1, 5)))
    holds, changes = ServerHolds(balancer, 0.5), []
    async with asyncio.timeout(60), holds.holding(WeightVersion(1, 5), lambda: changes.append(holds.any)):
        await until(lambda: holds.any)
        first, second = (server.engine for server in balancer.servers)
        first.well = False
        await holds._renew(WeightVersion(1, 5))
        assert holds.any
        assert not second.holders
        holds._until = dict.fromkeys(holds._until, 0.0)
        await holds._renew(WeightVersion(1, 5))
        assert second.holders
    assert not holds.any
    assert not second.holders
    assert changes == [True]


async def test_after_a_restart_the_evaluation_goes_on_with_the_weights_that_a_server_still_has(tmp_path):
    run = RunUnderTest(tmp_path, MemoryQueue(version=6, limit=0), holds=True)
    run.balancer.servers[0].engine.delay_s = 0.3
    run.serve(1, 5)
    async with following(run):
        await until(lambda: run.records)
    assert [(record.step, record.version_max) for record in run.records] == [(5, "e000001-s000005")]
