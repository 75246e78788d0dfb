"""Trainers after and beside each other on one run, over a real queue: nothing durable is undone, and every epoch is one
trainer's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.trainer.loop.ledger import LedgerFile
from shared.errors import Fenced
from shared.queue.queue import TicketQueue
from shared.queue.records import Reservation
from shared.run import archive, checkpoint_files, commits
from shared.run import state as states
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from tests.support.small_run import BATCH, ETA, RUN, STEPS, Incarnation, group, write_config
from volley_proof.verify import command


class TrainerRun:
    """A run's folder and queue, with trainers beside each other on them."""

    def __init__(self, folder: Path, redis: Redis, executors: list[ThreadPoolExecutor]) -> None:
        self.folder, self.redis, self.queue, self.executors = (
            write_config(folder),
            redis,
            TicketQueue(redis, RUN),
            executors,
        )

    def trainer(self) -> Incarnation:
        self.executors.append(ThreadPoolExecutor(1))
        return Incarnation(self.folder, self.executors[-1], queue=TicketQueue(self.redis, RUN))

    async def feed(self, n: int) -> None:
        """As many groups as make `n` steps, sampled by the newest durable weights."""
        for _ in range(n * BATCH):
            reserved = await self.queue.reserve(600.0, BATCH, ETA, BATCH * STEPS)
            assert isinstance(reserved, Reservation)
            state = await self.queue.state()
            version = WeightVersion(state.epoch, state.version)
            await self.queue.publish(reserved.ticket, group(reserved.ticket, version).encode())

    def head(self) -> states.TrainerState:
        newest = commits.newest(RunFolder(self.folder))
        assert newest is not None
        return newest

    async def finish(self, trainer: Incarnation) -> None:
        while trainer.status.durable_step < STEPS:
            step = trainer.status.durable_step
            await self.feed(1)
            await trainer.until(lambda status, step=step: status.durable_step > step)


@pytest.fixture
def run(tmp_path: Path, redis: Redis) -> Iterator[TrainerRun]:
    executors: list[ThreadPoolExecutor] = []
    yield TrainerRun(tmp_path / RUN, redis, executors)
    for executor in executors:
        executor.shutdown()


async def ended(running: asyncio.Future[None]) -> None:
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_steps_made_while_a_successor_loads_are_kept(run: TrainerRun):
    old, new = run.trainer(), run.trainer()
    first = asyncio.ensure_future(old.worker.run())
    await old.until(lambda status: status.phase == "waiting")
    await run.feed(1)
    await old.until(lambda status: status.durable_step == 1)
    new.backend.may_build.clear()
    second = asyncio.ensure_future(new.worker.run())
    await asyncio.to_thread(new.backend.restored.wait, 10)
    await run.feed(1)
    await old.until(lambda status: status.durable_step == 2)
    new.backend.may_build.set()
    await new.until(lambda status: status.phase == "waiting")
    with pytest.raises(Fenced):
        await first
    assert (new.status.step, new.backend.weight) == (2, 2.0)
    await run.finish(new)
    await ended(second)
    result = await asyncio.to_thread(command.verify, RunFolder(run.folder))
    assert (result["ok"], result["undone"], result["superseded_archives"]) == (True, [], [])
    assert not any("rollback" in line for line in LedgerFile(run.folder / "ledger.jsonl").read())


async def test_a_checkpoint_that_comes_after_the_successor_looked_for_it_is_never_seen(run: TrainerRun):
    """Its step is in the log all the same."""
    old, new = run.trainer(), run.trainer()
    first = asyncio.ensure_future(old.worker.run())
    await old.until(lambda status: status.phase == "waiting")
    old.backend.may_save.clear()
    await run.feed(1)
    await old.until(lambda status: status.durable_step == 1)
    second = asyncio.ensure_future(new.worker.run())
    while not (await run.queue.state()).ready or (await run.queue.state()).epoch == 1:
        await asyncio.sleep(0.01)
    old.backend.may_save.set()
    with pytest.raises(Fenced):
        await first
    assert WeightVersion(1, 1) not in checkpoint_files.versions(run.folder / "checkpoints")
    await new.until(lambda status: status.durable_step == 1)
    await run.finish(new)
    await ended(second)
    result = await asyncio.to_thread(command.verify, RunFolder(run.folder))
    assert (result["ok"], result["by_disposition"]) == (True, {"trained": BATCH * STEPS})


async def test_a_successor_of_a_first_trainer_that_it_did_not_see_goes_on_from_it(run: TrainerRun):
    new, old = run.trainer(), run.trainer()
    new.backend.may_build.clear()
    second = asyncio.ensure_future(new.worker.run())
    await asyncio.to_thread(new.backend.restored.wait, 10)
    first = asyncio.ensure_future(old.worker.run())
    await old.until(lambda status: status.phase == "waiting")
    await run.feed(1)
    await old.until(lambda status: status.durable_step == 1)
    new.backend.may_build.set()
    await new.until(lambda status: status.phase == "waiting")
    with pytest.raises(Fenced):
        await first
    assert run.head().lineage[0] == (1, 0)
    assert run.head().step == 1
    await ended(second)


async def test_a_queue_wiped_after_the_last_step_hears_of_it_again(run: TrainerRun):
    trainer = run.trainer()
    running = asyncio.ensure_future(trainer.worker.run())
    await trainer.until(lambda status: status.phase == "waiting")
    await run.finish(trainer)
    await trainer.until(lambda status: status.phase == "done")
    await run.redis.flushall()
    with pytest.raises(Fenced):
        await asyncio.wait_for(running, 60)
    again = run.trainer()
    running = asyncio.ensure_future(again.worker.run())
    await again.until(lambda status: status.phase == "done")
    state = await run.queue.state()
    assert (state.ready, state.version) == (True, STEPS)
    await ended(running)


async def test_a_queue_wiped_after_begin_does_not_give_an_epoch_twice(run: TrainerRun):
    early, late = run.trainer(), run.trainer()
    early.backend.may_start.clear()
    first = asyncio.ensure_future(early.worker.run())
    while archive.Archive(run.folder / "archive", RUN).last_epoch() == 0:
        await asyncio.sleep(0.01)
    await run.redis.flushall()
    second = asyncio.ensure_future(late.worker.run())
    await late.until(lambda status: status.phase == "waiting")
    assert late.status.epoch == 2
    early.backend.may_start.set()
    with pytest.raises(Fenced):
        await first
    await run.finish(late)
    await ended(second)
    assert (await asyncio.to_thread(command.verify, RunFolder(run.folder)))["ok"]
