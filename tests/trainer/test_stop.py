"""Stops in every phase, and disks that are full: what is trained is saved, and what is not written
down counts nowhere.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.trainer.loop.checkpointer import Checkpointer
from services.trainer.status import TrainerStatus
from shared.errors import StorageFull
from shared.types import Group, WeightVersion
from tests.trainer.fakes import Bench, stopped


class Array:
    """What is to be written."""


async def test_a_stop_ends_the_step_and_saves_what_is_not_durable(bench: Bench):
    bench.interval = 2
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.step == 1)
    await stopped(running)
    last = [event for event in bench.events if not event.startswith("publish")][-3:]
    assert last == ["commit version=1 tickets=[1, 2] void=0 ledger=2", "save e000001-s000001", "leave"]
    assert bench.status.phase == "stopped"


async def test_the_grace_ends_a_stop(bench: Bench):
    bench.interval, bench.backend.may_write, bench.grace_s = 2, threading.Event(), 0.05
    bench.backend.may_write.set()
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.durable_step == 1 and bench.status.phase == "waiting")
    bench.backend.may_write.clear()
    await stopped(running)
    bench.backend.may_write.set()
    assert (bench.status.durable_step, bench.status.checkpoint_step) == (1, 0)
    assert bench.events[-1] == "leave"  # what it held caused no crash


async def test_a_stop_while_the_queue_is_away_keeps_the_checkpoint(bench: Bench):
    bench.interval = 2
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.step == 1)
    bench.queue.away = 10**6
    await stopped(running)
    assert bench.backend.checkpoint is not None
    assert bench.backend.checkpoint.step == 1


async def test_a_stop_between_ledger_and_queue_saves_nothing_twice(bench: Bench):
    """What is durable and in the ledger is the next trainer's to tell the queue."""
    bench.queue.hangs_at_commit = True
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.durable_step == 1)
    await stopped(running)
    assert [event for event in bench.events if event.startswith(("save", "commit"))] == [
        "save e000001-s000000",
        "save e000001-s000001",
    ]
    assert {ticket: line["disposition"] for ticket, line in bench.ledger.settled().items()} == {
        1: "trained",
        2: "trained",
    }
    bench.queue.hangs_at_commit = False
    bench.status = TrainerStatus("r", bench.max_steps)
    bench.feed(3, 4, version="e000002-s000001")
    await bench.run_to_the_end()
    assert "begin low=2 version=1 issued=2 void=0 done=[]" in bench.events


async def test_a_stop_while_the_queue_is_away_from_the_start_is_no_failure(bench: Bench):
    bench.queue.away = 10**6
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.waiting_for)
    await stopped(running)


async def test_a_checkpoint_that_was_put_off_keeps_no_arrays():
    """What was to be written may be as large as all the rest of the trainer."""
    taken = list[weakref.ref[Array]]()
    status, saved = TrainerStatus("r", 9), WeightVersion(1, 0)

    def take(state: Any, base: WeightVersion) -> Callable[[], Path]:
        copy = Array()
        taken.append(weakref.ref(copy))

        def write() -> Path:
            array, cause = copy, OSError(28, "No space left on device")
            raise StorageFull(f"no room for {type(array).__name__}") from cause

        return write

    async def savable() -> Any:
        return SimpleNamespace(version=WeightVersion(1, 1), step=1, epoch=1)

    async def blocking(call: Callable[..., Any], *given: Any) -> Any:
        return call(*given)

    parts: Any = SimpleNamespace(backend=SimpleNamespace(take=take))
    settlement: Any = SimpleNamespace(pending=SimpleNamespace(saved=saved), savable=savable)
    plan, waiter = cast("Any", None), cast("Any", SimpleNamespace(blocking=blocking))
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        checkpointer = Checkpointer(plan, parts, settlement, status, waiter, group)
        await checkpointer.begin()
        while status.waiting_for is None or taken[0]() is not None:
            await asyncio.sleep(0.01)
        assert status.waiting_for == "checkpoint of step 1: no room for Array"


async def test_a_full_disk_puts_checkpoints_off_and_holds_no_step_up(bench: Bench, caplog: pytest.LogCaptureFixture):
    bench.backend.full = 2
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "waiting")
    assert "no disk space under /r: 0 MB free" in str([vars(record) for record in caplog.records])
    bench.backend.full = 2
    bench.feed(1, 2, 3, 4)
    await bench.until(lambda: bench.status.phase == "done" and bench.status.waiting_for is None)
    await stopped(running)
    assert [e for e in bench.events if e.startswith("save")] == ["save e000001-s000000", "save e000001-s000002"]
    assert (bench.status.durable_step, bench.status.checkpoint_step) == (2, 2)


async def test_steps_are_made_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(bench: Bench):
    bench.max_steps, bench.max_staleness, bench.backend.may_write = 3, 9, threading.Event()
    bench.backend.may_write.set()
    bench.status = TrainerStatus("r", 3)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "waiting")
    bench.backend.may_write.clear()
    bench.feed(1, 2, 3, 4, 5, 6)
    await bench.until(lambda: bench.status.durable_step == 2)
    assert bench.status.checkpoint_step == 0
    bench.backend.may_write.set()
    await bench.until(lambda: bench.status.phase == "done")
    await stopped(running)
    assert [e for e in bench.events if e.startswith("save")] == [f"save e000001-s00000{n}" for n in range(4)]
    assert bench.backend.kept[WeightVersion(1, 1)] == [1, 2]


async def test_an_archive_that_cannot_be_written_lets_no_step_count(bench: Bench):
    """A stop comes while the groups of a trained step cannot be archived: no checkpoint may hold their effect."""
    bench.interval, bench.max_steps = 2, 9
    bench.archive.full = 10**6
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: "step [1, 2]" in bench.events and bench.status.waiting_for)
    await stopped(running)
    assert [event for event in bench.events if event.startswith(("save", "commit"))] == ["save e000001-s000000"]
    assert not (bench.folder / "ledger.jsonl").exists()


async def test_a_ticket_whose_end_cannot_be_written_is_in_no_checkpoint(bench: Bench):
    bench.interval, bench.max_steps = 9, 9
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.step == 1)
    bench.ledger.full = 10**6
    bench.queue.put(Group(3, "toy", "t", (), failure="Timeout"))
    await bench.until(lambda: bench.status.waiting_for and "disk" in bench.status.waiting_for)
    await stopped(running)
    assert [event for event in bench.events if event.startswith("save")] == ["save e000001-s000000"]


async def test_a_stopped_warm_start_takes_nothing_over(bench: Bench):
    bench.warm = False
    await bench.worker().run()
    assert bench.events == ["build", "warm start"]


async def paused(bench: Bench) -> None:
    bench.status.ask(pause=True)
    await bench.until(lambda: bench.status.phase == "paused")


async def waiting(bench: Bench) -> None:
    await bench.until(lambda: bench.status.phase == "waiting")


async def without_a_queue_that_answers(bench: Bench) -> None:
    bench.queue.hangs = True
    await bench.queue.hanging.wait()


async def without_a_queue(bench: Bench) -> None:
    bench.queue.away = 10**6
    await bench.until(lambda: bench.status.waiting_for and "Redis" in bench.status.waiting_for)


async def saving(bench: Bench) -> None:
    bench.backend.save_s = 0.3
    bench.status.ask(checkpoint=True)
    await bench.until(lambda: not bench.status.checkpoint_wanted)


async def ending_a_ticket_without_a_queue_that_answers(bench: Bench) -> None:
    await bench.until(lambda: bench.status.tickets.get("trained"))
    bench.queue.hangs_at_commit = True
    bench.queue.put(Group(3, "toy", "t", (), failure="Timeout"))
    await bench.until(lambda: bench.status.tickets.get("failed"))


PHASES = [
    waiting,
    paused,
    saving,
    without_a_queue,
    without_a_queue_that_answers,
    ending_a_ticket_without_a_queue_that_answers,
]


@pytest.mark.parametrize("phase", PHASES)
async def test_a_stop_in_any_phase_leaves_a_checkpoint_of_every_step(
    bench: Bench, phase: Callable[[Bench], Awaitable[None]]
):
    bench.interval, bench.max_staleness, bench.max_steps = 9, 9, 9
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.step == 1)
    await phase(bench)
    await stopped(running)
    assert bench.status.phase == "stopped"
    assert bench.backend.checkpoint is not None
    assert bench.backend.checkpoint.step == 1


async def test_a_stop_while_training_waits_for_the_step_and_its_checkpoint(bench: Bench):
    bench.interval, bench.max_staleness, bench.max_steps, bench.backend.step_s = 9, 9, 9, 0.2
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.phase == "training")
    await stopped(running)
    assert bench.backend.checkpoint is not None
    assert bench.backend.checkpoint.step == 1
