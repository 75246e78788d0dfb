"""The order of a hand-over, and how the loop stops, waits and fails; with a model and a queue that only keep books."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.trainer.board import Board
from services.trainer.intake import Rules
from services.trainer.loop import Loop
from services.trainer.metrics import StepMetrics, of_groups
from services.trainer.parts import Parts, Plan
from services.trainer.records import Ledger, StepLog
from shared import archive, ledger
from shared.archive import Archive
from shared.errors import Fenced, QueueUnavailable, StorageFull, WeightsError
from shared.queue.records import Entry
from shared.state import TrainerState
from shared.types import Group, WeightVersion
from tests.trainer.support import group


@dataclass
class FakeBackend:
    """Weights are a number: how many steps were trained. Checkpoints are folders without content."""

    folder: Path
    events: list[str]
    checkpoint: TrainerState | None = None
    broken: bool = False
    save_s: float = 0.0
    bad: dict[str, str] = field(default_factory=dict)
    full: int = 0

    def head(self) -> WeightVersion | None:
        return self.checkpoint.version if self.checkpoint else None

    def mend(self) -> None: ...

    def restore(self) -> TrainerState | None:
        if self.broken:
            raise WeightsError("none of the 2 checkpoints is whole")
        return self.checkpoint

    def build(self) -> None:
        self.events.append("build")

    def start(self, state: TrainerState) -> Path:
        return self.save(state, None)

    def step(self, held: Any, before: WeightVersion) -> StepMetrics:
        self.events.append(f"step {[h.group.ticket for h in held]}")
        after = WeightVersion(before.epoch, before.step + 1)
        names = (
            "loss",
            "grad_norm",
            "kl",
            "logprob_abs_diff",
            "logprob_abs_diff_current",
            "logprob_abs_diff_current_max",
            "clip_fraction",
            "entropy",
        )
        numbers = dict.fromkeys(names, 0.0)
        return StepMetrics(step=after.step, version=str(after), tokens=1, **of_groups(held, before.step), **numbers)

    def save(self, state: TrainerState, base: WeightVersion | None) -> Path:
        time.sleep(self.save_s)
        if self.full:
            self.full -= 1
            raise StorageFull("waiting for disk space under /r: 0 MB free")
        self.events.append(f"save {state.version}")
        self.checkpoint = state
        return self.folder / str(state.version)


@dataclass
class FakeQueue:
    """Entries are given out once; `away` answers fail first."""

    events: list[str]
    ledger: Path
    entries: list[Entry] = field(default_factory=list)
    away: int = 0
    fenced_after: int = 10**6
    attended: int = 0

    def publish(self, made: Group) -> None:
        self.entries.append(Entry(f"{made.ticket}-0", made.ticket, made.encode(), 1))

    def _answer(self) -> None:
        if self.away:
            self.away -= 1
            raise QueueUnavailable("Redis did not answer")

    async def begin(self, low: int, version: int, issued: int, void: int, done: Any, epoch: int, above: int) -> int:
        self._answer()
        self.events.append(f"begin low={low} version={version} issued={issued} void={void} done={list(done)}")
        return max(epoch, above) + 1

    async def leave(self, epoch: int) -> None:
        self._answer()
        self.events.append("leave")

    async def read(self, epoch: int, consumer: str, count: int, block_ms: int) -> list[Entry]:
        self._answer()
        await asyncio.sleep(0.01)
        found, self.entries = self.entries[:count], self.entries[count:]
        return found

    async def commit(self, epoch: int, version: int, finished: Any, void: int) -> None:
        self._answer()
        if version >= self.fenced_after:
            raise Fenced("epoch 1 was replaced")
        self.attended += 1
        if not finished:
            return
        durable = len(self.ledger.read_text().splitlines())
        self.events.append(f"commit version={version} tickets={[f.ticket for f in finished]} void={void} ledger={durable}")

    async def dead_letter(self, epoch: int, entry: Entry, reason: str) -> None:
        self.events.append(f"dead {entry.ticket}")


@dataclass
class Bench:
    """A loop on fakes, and what happened in it."""

    folder: Path
    executor: ThreadPoolExecutor
    max_steps: int = 2
    interval: int = 1
    eta: int = 1
    warm: bool = True
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        self.events: list[str] = []
        self.backend = FakeBackend(self.folder, self.events)
        self.queue = FakeQueue(self.events, self.folder / "ledger.jsonl")
        self.board = Board("r", self.max_steps)
        self.published: list[str] = []

    def loop(self) -> Loop:
        async def warm_start() -> None:
            self.events.append("warm start")
            if not self.warm:
                self.board.stop()

        async def publish(folder: Path) -> list:
            self.events.append(f"publish {folder.name}")
            return []

        parts = Parts(
            self.backend,
            self.backend,
            self.queue,
            Ledger(self.folder / "ledger.jsonl"),
            Archive(self.folder / "archive", "r"),
            StepLog(self.folder / "metrics.jsonl"),
            StepLog(self.folder / "handovers.jsonl"),
            self.executor,
            warm_start,
            publish,
        )
        rules = Rules("arrival", self.eta, 32, 96, 2)
        return Loop(Plan(self.max_steps, 2, self.interval, self.grace_s, 0, False, rules), parts, self.board)

    async def run_to_the_end(self) -> None:
        """Until the last step is durable; then it is stopped."""
        running = asyncio.ensure_future(self.loop().run())
        await self.until(lambda: self.board.phase == "done" or running.done())
        await stopped(running)

    def feed(self, *tickets: int, version: str = "e000001-s000000") -> None:
        for ticket in tickets:
            self.queue.publish(group(ticket, version))

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(10):
            while not what():
                await asyncio.sleep(0.005)


async def stopped(running: asyncio.Future[None]) -> None:
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with ThreadPoolExecutor(1) as executor:
        yield Bench(tmp_path, executor)


async def test_durable_then_ledger_then_commit_then_publish(bench: Bench):
    bench.max_steps = 1
    bench.board = Board("r", 1)
    bench.feed(1, 2)
    await bench.run_to_the_end()
    assert bench.events == [
        "build",
        "warm start",
        "begin low=0 version=0 issued=0 void=0 done=[]",
        "save e000001-s000000",
        "publish e000001-s000000",
        "step [1, 2]",
        "save e000001-s000001",
        "commit version=1 tickets=[1, 2] void=0 ledger=2",
        "publish e000001-s000001",
        "leave",
    ]
    assert bench.board.phase == "stopped"
    assert bench.backend.checkpoint is not None
    assert bench.backend.checkpoint.phase == "done"


async def test_trained_groups_are_archived_in_the_order_of_the_step_and_named_by_digest(bench: Bench):
    bench.feed(2, 1, 4, 3)
    await bench.run_to_the_end()
    lines = [line for line in map(ledger.parse, (bench.folder / "ledger.jsonl").read_bytes().splitlines()) if line]
    for step, tickets in ((1, [2, 1]), (2, [4, 3])):
        payloads = list(archive.read(bench.folder / "archive", "r", WeightVersion(1, step)))
        assert payloads == [group(ticket, "e000001-s000000").encode() for ticket in tickets]
        assert [archive.digest(x) for x in payloads] == [line["digest"] for line in lines if line["step"] == step]


async def test_a_full_disk_ends_the_trainer_before_the_step_counts(bench: Bench):
    (bench.folder / "archive").write_text("no folder")
    bench.feed(1, 2)
    with pytest.raises(OSError, match="archive"):
        await bench.run_to_the_end()
    assert not any(event.startswith("commit") for event in bench.events)


async def test_a_longer_interval_saves_at_its_end_and_at_the_last_step(bench: Bench):
    bench.max_steps, bench.interval, bench.eta = 3, 2, 9
    bench.board = Board("r", 3)
    bench.feed(1, 2, 3, 4, 5, 6)
    await bench.run_to_the_end()
    assert [e for e in bench.events if e.startswith(("save", "commit"))] == [
        "save e000001-s000000",
        "save e000001-s000002",
        "commit version=2 tickets=[1, 2, 3, 4] void=0 ledger=4",
        "save e000001-s000003",
        "commit version=3 tickets=[5, 6] void=0 ledger=6",
    ]


async def test_stale_groups_are_void_and_make_room_at_once(bench: Bench):
    bench.eta = 0
    bench.feed(1, 2, 3, 4)
    running = asyncio.ensure_future(bench.loop().run())
    await bench.until(lambda: bench.board.tickets.get("stale") == 2)
    bench.feed(5, 6, version="e000001-s000001")
    await bench.until(lambda: bench.board.phase == "done")
    await stopped(running)
    assert "commit version=1 tickets=[3, 4] void=2 ledger=4" in bench.events
    assert bench.events[-3:-1] == ["commit version=2 tickets=[5, 6] void=2 ledger=6", "publish e000001-s000002"]


async def test_a_stop_ends_the_step_and_saves_what_is_not_durable(bench: Bench):
    bench.interval = 2
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.loop().run())
    await bench.until(lambda: bench.board.step == 1)
    await stopped(running)
    last = [event for event in bench.events if not event.startswith("publish")][-3:]
    assert last == ["save e000001-s000001", "commit version=1 tickets=[1, 2] void=0 ledger=2", "leave"]
    assert bench.board.phase == "stopped"


async def test_the_grace_ends_a_stop(bench: Bench):
    bench.interval, bench.backend.save_s, bench.grace_s = 2, 0.3, 0.05
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.loop().run())
    await bench.until(lambda: bench.board.step == 1)
    await stopped(running)
    assert bench.board.durable_step == 0


async def test_the_queue_may_be_away_for_a_while(bench: Bench):
    bench.queue.away = 2
    bench.feed(1, 2, 3, 4)
    await bench.run_to_the_end()
    assert bench.board.step == 2


async def test_a_stop_while_the_queue_is_away_keeps_the_checkpoint(bench: Bench):
    bench.interval = 2
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.loop().run())
    await bench.until(lambda: bench.board.step == 1)
    bench.queue.away = 10**6
    await stopped(running)
    assert bench.backend.checkpoint is not None
    assert bench.backend.checkpoint.step == 1


async def test_a_stop_while_the_queue_is_away_from_the_start_is_no_failure(bench: Bench):
    bench.queue.away = 10**6
    running = asyncio.ensure_future(bench.loop().run())
    await bench.until(lambda: bench.board.waiting_for)
    await stopped(running)


async def test_a_fenced_trainer_ends_with_that_one_error(bench: Bench):
    bench.queue.fenced_after = 1
    bench.feed(1, 2)
    with pytest.raises(Fenced, match="epoch 1 was replaced"):
        await bench.run_to_the_end()


async def test_checkpoints_that_are_all_damaged_end_the_run(bench: Bench):
    bench.backend.broken = True
    with pytest.raises(WeightsError):
        await bench.run_to_the_end()


async def test_a_stopped_warm_start_takes_nothing_over(bench: Bench):
    bench.warm = False
    await bench.loop().run()
    assert bench.events == ["build", "warm start"]


async def test_a_new_incarnation_continues_and_remembers_void_tickets(bench: Bench):
    bench.feed(1, 2)
    first = asyncio.ensure_future(bench.loop().run())
    await bench.until(lambda: bench.board.durable_step == 1)
    bench.queue.publish(Group(4, "toy", "t", (), failure="Timeout"))
    await bench.until(lambda: bench.board.tickets.get("failed") == 1)
    await stopped(first)
    bench.events.clear()
    bench.board = Board("r", 2)
    bench.feed(3, 5, version="e000002-s000001")
    await bench.run_to_the_end()
    assert bench.events[1] == "begin low=2 version=1 issued=4 void=1 done=[4]"
    assert bench.events[-3:-1] == ["commit version=2 tickets=[3, 5] void=1 ledger=5", "publish e000002-s000002"]


async def test_pause_holds_the_next_step_and_resume_lets_it_go(bench: Bench):
    bench.board.ask(pause=True)
    bench.feed(1, 2, 3, 4)
    running = asyncio.ensure_future(bench.loop().run())
    await bench.until(lambda: bench.board.phase == "paused" and bench.board.waiting_groups == 4)
    assert bench.board.step == 0
    bench.board.ask(pause=False)
    await bench.until(lambda: bench.board.step == 2)
    await stopped(running)


async def test_a_wanted_checkpoint_comes_while_groups_are_missing(bench: Bench):
    bench.interval, bench.eta = 9, 9
    bench.feed(1, 2)
    running = asyncio.ensure_future(bench.loop().run())
    await bench.until(lambda: bench.board.phase == "waiting" and bench.board.step == 1)
    bench.board.ask(checkpoint=True)
    await bench.until(lambda: bench.board.durable_step == 1)
    await stopped(running)
