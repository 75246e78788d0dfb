"""The ticket loop: publishes every reserved ticket once, survives Redis and trainer, gives back what
it cannot finish.
"""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.episodes.groups import run_group
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.reservations import Admission
from services.orchestrator.schedule.ticket_loop import TicketLoop
from services.orchestrator.servers.balancer import VersionBounds
from services.orchestrator.status import RunStatus
from shared.errors import VolleyError
from shared.queue.records import Published, Reservation
from shared.types import Group
from tests.orchestrator.fakes import (
    MemoryQueue,
    ScriptedEngine,
    ScriptedEnv,
    balancer_of,
    dispatcher_of,
    plan,
    unreachable,
)
from tests.support.virtual_time import virtual_time

TERMS = Admission(batch=2, max_staleness=1, total=100, lease_s=0.09, patience_s=5.0)


def loop_of(queue, run=None, env=None, engine=None, n_groups=2):
    gate, status = ReservationGate(), RunStatus()
    gate.release(ReservationGate.START)
    dispatcher = dispatcher_of(env or ScriptedEnv(n_turns=1), balancer_of(engine or ScriptedEngine()))
    run = run or (lambda ticket, need: run_group(dispatcher, plan(2), ticket, need))
    return TicketLoop(queue, gate, status, TERMS, n_groups=n_groups, run_group=run), gate, status


async def run_until(loop, condition, timeout_s=60.0):
    task = asyncio.ensure_future(loop.run())
    async with asyncio.timeout(timeout_s):
        while not condition() and not task.done():
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and task.exception():
        raise task.exception()


async def test_every_ticket_is_published_once_with_its_own_task():
    queue = MemoryQueue(limit=12)
    loop, _, status = loop_of(queue)
    await run_until(loop, lambda: len(queue.published) == 12)
    groups = [Group.decode(queue.published[t]) for t in range(1, 13)]
    assert [g.ticket for g in groups] == list(range(1, 13))
    assert len({g.task for g in groups[:10]}) == 10
    assert status.published == 12


async def test_a_full_queue_is_the_only_brake_and_is_named():
    queue = MemoryQueue(limit=3)
    loop, _, status = loop_of(queue)
    await run_until(loop, lambda: len(queue.published) == 3 and status.running == 0 and status.waiting)
    assert status.state(None) == ("waiting", "the trainer has enough groups and has not finished a step yet")


@virtual_time
async def test_a_trainer_that_is_not_up_yet_is_waited_for():
    queue = MemoryQueue(limit=2, ready=False)
    loop, _, status = loop_of(queue)
    task = asyncio.ensure_future(run_until(loop, lambda: len(queue.published) == 2))
    await asyncio.sleep(0.05)
    assert "trainer" in status.state(None)[1]
    queue.ready = True
    await task


@virtual_time
async def test_redis_away_loses_nothing():
    queue = MemoryQueue(limit=6, away=3)
    loop, _, _ = loop_of(queue)
    task = asyncio.ensure_future(run_until(loop, lambda: len(queue.published) == 6))
    await asyncio.sleep(0.4)
    queue.away = 3
    await task


async def test_a_group_waits_for_a_trainer_that_restarts():
    queue = MemoryQueue(limit=1, answers=[Published.NOT_READY, Published.NOT_READY])
    loop, _, status = loop_of(queue)
    await run_until(loop, lambda: 1 in queue.published)
    assert status.published == 1


@pytest.mark.parametrize("outcome", [Published.DUPLICATE, Published.DONE, Published.UNKNOWN])
async def test_a_group_that_is_not_wanted_is_dropped(outcome):
    queue = MemoryQueue(limit=1, answers=[outcome])
    loop, _, status = loop_of(queue)
    await run_until(loop, lambda: not queue.answers)
    assert status.published == 0


@virtual_time
async def test_leases_are_renewed_while_a_group_is_worked_on():
    queue = MemoryQueue(limit=1)
    loop, _, _ = loop_of(queue, env=ScriptedEnv(n_turns=1, delay_s=0.1))
    await run_until(loop, lambda: len(queue.published) == 1)
    assert len(queue.renewed) >= 3
    assert set(queue.renewed) == {1}


async def test_tickets_in_hand_are_given_back_when_the_service_stops():
    queue = MemoryQueue(limit=8)
    env = ScriptedEnv()
    loop, _, _ = loop_of(queue, env=env, engine=ScriptedEngine(delay_s=30), n_groups=3)
    await run_until(loop, lambda: len(env.open) == 6)
    assert sorted(queue.given_back) == [1, 2, 3]
    assert not env.open
    assert not queue.published


@virtual_time
async def test_a_ticket_that_comes_when_the_service_is_stopping_is_given_back():
    class Slow(MemoryQueue):
        async def reserve_wait(self, *args):
            answer = await super().reserve_wait(*args)
            await asyncio.sleep(0.05)
            return answer

    queue = Slow(limit=1)
    loop, _, _ = loop_of(queue)
    task = asyncio.ensure_future(loop.run())
    while not queue.issued:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task])
    assert queue.given_back == [1]


@virtual_time
async def test_nothing_is_reserved_while_the_gate_is_closed():
    queue = MemoryQueue(limit=4)
    loop, gate, _ = loop_of(queue)
    gate.close("evaluation")
    task = asyncio.ensure_future(run_until(loop, lambda: len(queue.published) == 4))
    await asyncio.sleep(0.05)
    assert queue.issued == 0
    gate.release("evaluation")
    await task


async def test_a_failed_group_is_published_as_failed():
    queue = MemoryQueue(limit=1)
    loop, _, status = loop_of(queue, env=ScriptedEnv(prompt="x " * 500))
    await run_until(loop, lambda: 1 in queue.published)
    assert Group.decode(queue.published[1]).failure == "PromptTooLong in demo at turn 0"
    assert status.failed_groups == 1


async def test_nothing_but_failures_stops_the_run():
    queue = MemoryQueue(limit=1000)
    loop, _, _ = loop_of(queue, env=ScriptedEnv(prompt="x " * 500))
    with pytest.raises(ExceptionGroup) as caught:
        await run_until(loop, lambda: False)
    assert caught.group_contains(VolleyError, match="8 groups in a row failed, the last with PromptTooLong")


async def test_groups_that_one_event_broke_count_once():
    restart = asyncio.Event()

    async def run(ticket, need):
        await restart.wait()
        return Group(ticket, "demo", "t", (), failure="EpisodeLost")

    queue = MemoryQueue(limit=32)
    loop, _, _ = loop_of(queue, run=run, n_groups=32)
    task = asyncio.ensure_future(run_until(loop, lambda: len(queue.published) == 32))
    while len(loop.leased) < 32:
        await asyncio.sleep(0.001)
    restart.set()
    await task


@virtual_time
async def test_at_most_n_groups_are_in_memory():
    active, peak = 0, 0

    async def run(ticket, need):
        nonlocal active, peak
        active, peak = active + 1, max(peak, active + 1)
        await asyncio.sleep(0.01)
        active -= 1
        return Group(ticket, "demo", "t", (), failure="Test" if ticket % 3 == 0 else "Other")

    queue = MemoryQueue(limit=7)
    loop, _, _ = loop_of(queue, run=run, n_groups=3)
    await run_until(loop, lambda: len(queue.published) == 7)
    assert peak == 3


async def test_an_earlier_ticket_is_worked_on_while_later_groups_wait_for_an_evaluation():
    queue = MemoryQueue(limit=50)
    loop, _, _ = loop_of(queue, n_groups=2)
    loop.publishable_step = 1

    def is_made_again():
        if {1, 2} <= queue.published.keys() and len(loop.leased) >= 2 and not undone:
            undone.append(queue.published.pop(1))  # the trainer went back to an older checkpoint
            queue.given_back.append(1)
        return bool(undone) and 1 in queue.published

    undone = []
    await run_until(loop, is_made_again)
    assert queue.published.keys() == {1, 2}
    assert queue.issued <= 2 + 2 * 2  # the waiting groups, and those that were made beside them


@given(
    ticket_in_cap=st.integers(0, 99),
    version=st.integers(0, 50),
    max_staleness=st.integers(0, 4),
    batch=st.integers(1, 16),
    void=st.integers(0, 30),
)
def test_the_need_of_a_ticket_can_be_met_and_keeps_it_from_being_stale(
    ticket_in_cap, version, max_staleness, batch, void
):
    terms = Admission(batch, max_staleness, 10_000, 60, 60)
    admitted = (version + max_staleness + 1) * batch + void
    ticket = max(1, admitted - ticket_in_cap % ((max_staleness + 1) * batch))
    need = terms.need(Reservation(ticket, version), void)
    assert need.min_step <= version
    trained_at = (ticket - void - 1) // batch
    assert trained_at - need.min_step <= max_staleness or trained_at < 0
    assert terms.need(Reservation(ticket, version), 0).min_step <= version


def test_need_of_a_synchronous_run_is_the_newest_version():
    assert Admission(4, 0, 100, 60, 60).need(Reservation(9, 2), 0) == VersionBounds(2)


async def test_errors_of_the_service_itself_end_the_loop():
    async def run(ticket, need):
        raise KeyError("a defect")

    loop, _, _ = loop_of(MemoryQueue(limit=1), run=run)
    with pytest.raises(ExceptionGroup) as caught:
        await run_until(loop, lambda: False)
    assert caught.group_contains(KeyError)


async def test_a_rough_environment_does_not_stop_the_loop():
    queue = MemoryQueue(limit=6)
    loop, _, _ = loop_of(queue, env=ScriptedEnv(n_turns=1, create_failures=unreachable(3)))
    await run_until(loop, lambda: len(queue.published) == 6)
    assert all(Group.decode(data).failure is None for data in queue.published.values())


def test_a_ticket_issued_again_asks_for_weights_that_can_still_be_trained():
    """Voids before it would place ticket 5 in step 1, but step 1 is over: it trains at step 2 or later."""
    assert Admission(4, 0, 100, 60, 60).need(Reservation(5, 1), 2) == VersionBounds(1)
