"""A producer and a trainer as processes of their own, for the tests that kill them.

The trainer's weights depend on the order and the number of times groups are trained, so equal weights mean: no group
was lost, none counted twice, all came in their turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared import codec
from shared.errors import Fenced, QueueUnavailable
from shared.queue.client import connect
from shared.queue.queue import Finished, Published, Reservation, StreamEntry, TicketQueue
from shared.run.progress import TicketProgress
from tests.support.redis import begun

RUN, BATCH, ETA, INTERVAL, STEPS, WIDTH = "chaos", 4, 2, 3, 66, 512
LEASE_S, PAUSE_S = 1.0, 0.02
FENCED_EXIT = 4
_FAULTY = 13  # of the tickets that are its multiples the group is a failure: they end without training


def group(ticket: int) -> np.ndarray:
    """What generation gives for a ticket: float32 [WIDTH]."""
    return np.random.default_rng(ticket).standard_normal(WIDTH).astype(np.float32)


def is_faulty(ticket: int) -> bool:
    return ticket % _FAULTY == 0


def train(weights: np.ndarray, groups: Iterable[np.ndarray]) -> np.ndarray:
    for g in groups:
        weights = np.float32(0.97) * weights + np.float32(0.03) * g
    return weights


def reference() -> np.ndarray:
    """The weights of a run without faults."""
    tickets = (t for t in range(1, 10 * BATCH * STEPS) if not is_faulty(t))
    return train(np.zeros(WIDTH, np.float32), (group(next(tickets)) for _ in range(BATCH * STEPS)))


async def patiently[T](call: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await call()
        except QueueUnavailable:
            await asyncio.sleep(PAUSE_S)


async def produce(url: str) -> None:
    async with connect(url) as redis:
        queue = TicketQueue(redis, RUN)
        while True:
            got = await patiently(lambda: queue.reserve_wait(LEASE_S, BATCH, ETA, BATCH * STEPS, deadline_s=1.0))
            if isinstance(got, Reservation):
                payload = codec.pack({"ticket": got.ticket, "group": group(got.ticket)})
                for _ in range(1 + (got.ticket % 7 == 0)):
                    await publish(queue, got.ticket, payload)


async def publish(queue: TicketQueue, ticket: int, payload: bytes) -> None:
    while await patiently(lambda: queue.publish(ticket, payload)) is Published.NOT_READY:
        await asyncio.sleep(PAUSE_S)


@dataclass
class QueueTrainer:
    queue: TicketQueue
    folder: Path
    epoch: int
    step: int
    progress: TicketProgress
    weights: np.ndarray

    def __post_init__(self) -> None:
        self.waiting: dict[int, StreamEntry] = {}
        self.uncommitted: list[Finished] = []

    async def run(self) -> None:
        while self.step < STEPS:
            entries = await patiently(lambda: self.queue.read(self.epoch, "trainer", 64, 100))
            self.waiting |= {entry.ticket: entry for entry in entries}
            await self.drop_faulty()
            while self.step < STEPS and (batch := self.next_batch()):
                self.weights = train(self.weights, (decode(entry) for entry in batch))
                self.step += 1
                for entry in batch:
                    self.finish(entry, void=False)
                await asyncio.sleep(PAUSE_S)
                if self.step % INTERVAL == 0 or self.step == STEPS:
                    await self.save_and_commit()

    async def drop_faulty(self) -> None:
        faulty = [entry for ticket, entry in self.waiting.items() if is_faulty(ticket)]
        void = [self.finish(entry, void=True) for entry in faulty]
        if void:
            await patiently(lambda: self.queue.commit(self.epoch, self.durable_step(), void, self.progress.void))

    def durable_step(self) -> int:
        return self.step - self.step % INTERVAL

    def next_batch(self) -> list[StreamEntry]:
        """The next tickets in order; empty if one of them is missing."""
        batch, ticket = [], self.progress.low
        while len(batch) < BATCH:
            ticket += 1
            if self.progress.is_finished(ticket):
                continue
            if ticket not in self.waiting:
                return []
            batch.append(self.waiting[ticket])
        return batch

    def finish(self, entry: StreamEntry, *, void: bool) -> Finished:
        assert self.progress.finish(entry.ticket, void=void)
        del self.waiting[entry.ticket]
        self.uncommitted.append(Finished(entry.ticket, entry.entry_id))
        return self.uncommitted[-1]

    async def save_and_commit(self) -> None:
        issued = (await patiently(self.queue.state)).issued
        save(self.folder, self.epoch, self.step, self.progress, issued, self.weights)
        await patiently(lambda: self.queue.commit(self.epoch, self.step, self.uncommitted, self.progress.void))
        self.uncommitted.clear()


def decode(entry: StreamEntry) -> np.ndarray:
    record = codec.unpack(entry.payload)
    assert record["ticket"] == entry.ticket
    return record["group"]


def save(folder: Path, epoch: int, step: int, progress: TicketProgress, issued: int, weights: np.ndarray) -> None:
    """Atomic and durable: files, folder, rename, parent."""
    draft = folder / f"draft-{os.getpid()}"
    draft.mkdir()
    state = {
        "epoch": epoch,
        "step": step,
        "issued": issued,
        "low": progress.low,
        "done": sorted(progress.done),
        "void": progress.void,
    }
    (draft / "state.json").write_text(json.dumps(state), encoding="utf-8")
    np.save(draft / "weights.npy", weights)
    for path in (*draft.iterdir(), draft):
        sync(path)
    draft.rename(folder / f"e{epoch:06d}-s{step:06d}")
    sync(folder)
    for old in checkpoints(folder)[:-3]:
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("e*-s*"))


def newest(folder: Path) -> tuple[dict[str, int], list[int], np.ndarray]:
    """(counters, finished tickets above low, weights) of the newest checkpoint, or of the start."""
    for path in reversed(checkpoints(folder)):
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return state, state.pop("done"), np.load(path / "weights.npy")
    return dict.fromkeys(("epoch", "step", "issued", "low", "void"), 0), [], np.zeros(WIDTH, np.float32)


async def run_trainer(url: str, folder: Path) -> None:
    async with connect(url) as redis:
        queue = TicketQueue(redis, RUN)
        state, done, weights = newest(folder)
        epoch = await patiently(
            lambda: begun(queue, state["low"], state["step"], state["issued"], state["void"], done, state["epoch"])
        )
        progress = TicketProgress(state["low"], done, state["void"])
        if state["epoch"] == 0:
            save(folder, epoch, 0, progress, 0, weights)
        await QueueTrainer(queue, folder, epoch, state["step"], progress, weights).run()


def main() -> None:
    role, url = sys.argv[1], os.environ["QUEUE_URL"]
    if role == "producer":
        asyncio.run(produce(url))
    try:
        asyncio.run(run_trainer(url, Path(sys.argv[2])))
    except Fenced:
        sys.exit(FENCED_EXIT)


if __name__ == "__main__":
    main()
