"""The loop on a model and a queue that only note what they are told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.trainer.groups.filters import NO_FILTERS, FilterOptions
from services.trainer.groups.group_buffer import AdmissionRules, Order
from services.trainer.interfaces import OnNonFinite, TrainPlan
from services.trainer.loop.collaborators import Collaborators
from services.trainer.loop.ledger import LedgerFile
from services.trainer.loop.refusals import Refusals
from services.trainer.loop.worker import TrainerWorker
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.publishing.publications import PublishedVersion
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from shared.errors import Fenced, NonFinite, QueueUnavailable, StorageFull, WeightsError
from shared.process.sinks import MetricsFanout
from shared.published.manifest import Chunk
from shared.queue.records import StreamEntry
from shared.run.archive import Archive
from shared.run.commits import CommitLog
from shared.run.state import TrainerState
from shared.types import Group, Lineage, WeightVersion
from tests.support.small_run import step_metrics
from tests.trainer.support import group


@dataclass
class FakeBackend:
    """Weights are the tickets they were trained on, in order; `spoiling` ones make them not finite. Checkpoints are in
    memory.
    """

    folder: Path
    events: list[str]
    checkpoint: TrainerState | None = None
    broken: bool = False
    save_s: float = 0.0
    may_write: threading.Event | None = None
    step_s: float = 0.0
    during_step: Callable[[], object] = lambda: None
    bad: dict[str, str] = field(default_factory=dict)
    full: int = 0
    full_at_fence: int = 0
    spoiling: set[int] = field(default_factory=set)
    diffs: dict[int, float] = field(default_factory=dict)
    weights: list[int] = field(default_factory=list)
    kept: dict[WeightVersion, list[int]] = field(default_factory=dict)
    states: dict[WeightVersion, TrainerState] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    plan: str = ""

    def head(self) -> WeightVersion | None:
        return self.checkpoint.version if self.checkpoint else None

    def fence(self, epoch: int) -> None:
        if self.full_at_fence:
            self.full_at_fence -= 1
            raise StorageFull("no disk space under /r: 0 MB free")

    def repair(self) -> None: ...

    def metrics(self) -> list[Mapping[str, Any]]:
        return []

    def oldest_step(self) -> int:
        return 0

    def restore(self) -> TrainerState | None:
        if self.broken:
            raise WeightsError("none of the 2 checkpoints is whole")
        return self.checkpoint

    def build(self) -> None:
        self.events.append("build")
        self.weights = list(self.kept[self.checkpoint.version]) if self.checkpoint else []

    def start(self, state: TrainerState) -> Path:
        return self.save(state, None)

    def compile(self) -> None: ...

    def step(self, held: Any, before: WeightVersion) -> StepMetrics:
        time.sleep(self.step_s)
        tickets = [h.group.ticket for h in held]
        self.events.append(f"step {tickets}")
        self.during_step()
        self.weights += tickets
        if what := [f"layer {ticket}" for ticket in tickets if ticket in self.spoiling]:
            raise NonFinite("not finite", what=["loss", *what])
        return step_metrics(held, before)

    def apply_settings(self, settings: Mapping[str, Any]) -> None: ...

    def checksum(self) -> str:
        return str(self.weights)

    def checksums(self) -> Mapping[str, str]:
        return {"params": self.checksum(), "optimizer": str(len(self.weights))}

    def logprob_diffs(self, held: Any, present: WeightVersion) -> list[float | None]:
        self.events.append(f"compare {[h.group.ticket for h in held]}")
        return [self.diffs.get(h.group.ticket, 0.0) if h.newest == present else None for h in held]

    def spot_check(self, held: Any, present: WeightVersion) -> list[Any]:
        return []

    def effective_share(self, held: Any, present: WeightVersion) -> float:
        return 1.0

    def rewind(self, version: WeightVersion) -> None:
        self.events.append(f"rewind {version}")
        self.weights = list(self.kept[version])

    def publish(self, version: WeightVersion) -> PublishedVersion:
        return PublishedVersion(version, Chunk("0" * 64, 1), "0" * 64, 1, 0, {})

    def take(self, state: TrainerState, base: WeightVersion) -> Callable[[], Path]:
        weights = list(self.weights)
        return lambda: self._written(state, weights)

    def save(self, state: TrainerState, base: WeightVersion | None) -> Path:
        return self._written(state, list(self.weights))

    def _written(self, state: TrainerState, weights: list[int]) -> Path:
        time.sleep(self.save_s)
        if self.may_write is not None:
            assert self.may_write.wait(60)
        if self.full:
            self.full -= 1
            raise StorageFull("no disk space under /r: 0 MB free")
        self.events.append(f"save {state.version}")
        self.checkpoint = self.states[state.version] = state
        self.kept[state.version] = weights
        return self.folder / str(state.version)


@dataclass
class FakeQueue:
    """Entries are given out once; `away` answers fail first."""

    events: list[str]
    ledger: Path
    entries: list[StreamEntry] = field(default_factory=list)
    away: int = 0
    hangs: bool = False
    hangs_at_commit: bool = False
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    fenced_after: int = 10**6
    attended: int = 0
    began: int = 0
    told: tuple[Lineage, str] = ((), "")

    def put(self, made: Group) -> None:
        self.entries.append(StreamEntry(f"{made.ticket}-0", made.ticket, made.encode(), 1))

    async def _answer(self) -> None:
        if self.hangs:
            self.hanging.set()
            await asyncio.sleep(3600)
        if self.away:
            self.away -= 1
            raise QueueUnavailable("Redis did not answer")

    async def begin(self, low: int, version: int, issued: int, void: int, done: Any, epoch: int, above: int) -> int:
        await self._answer()
        self.began += 1
        self.events.append(f"begin low={low} version={version} issued={issued} void={void} done={list(done)}")
        return max(epoch, above) + 1

    async def publish(self, ticket: int, payload: bytes) -> None:
        await self._answer()
        self.events.append(f"put back {ticket}")
        self.entries.append(StreamEntry(f"{ticket}-1", ticket, payload, 1))

    async def open(self, epoch: int, incarnations: Lineage = (), run_id: str = "") -> None:
        await self._answer()
        self.events.append("open")
        self.told = incarnations, run_id

    async def leave(self, epoch: int, refused: str = "") -> None:
        await self._answer()
        self.events.append("leave refused" if refused else "leave")

    async def read(self, epoch: int, consumer: str, count: int, block_ms: int) -> list[StreamEntry]:
        await self._answer()
        await asyncio.sleep(0.01)
        found, self.entries = self.entries[:count], self.entries[count:]
        return found

    async def commit(self, epoch: int, version: int, finished: Any, void: int) -> None:
        await self._answer()
        if version >= self.fenced_after:
            raise Fenced("epoch 1 was replaced")
        if finished and self.hangs_at_commit:
            await asyncio.sleep(3600)
        self.attended += 1
        if not finished:
            return
        durable = len(self.ledger.read_text(encoding="utf-8").splitlines())
        self.events.append(
            f"commit version={version} tickets={[f.ticket for f in finished]} void={void} ledger={durable}"
        )

    async def dead_letter(self, epoch: int, entry: StreamEntry, reason: str) -> None:
        self.events.append(f"dead {entry.ticket}")


class FullLedger(LedgerFile):
    """As long as `full` is above 0, there is no room."""

    full = 0

    def append(self, lines: Any) -> None:
        if self.full:
            self.full -= 1
            raise StorageFull("no disk space under /r: 0 MB free")
        super().append(lines)


class FullArchive(Archive):
    full = 0

    def write(self, version: WeightVersion, payloads: Any) -> list[str]:
        if self.full:
            self.full -= 1
            raise StorageFull("no disk space under /r: 0 MB free")
        return super().write(version, payloads)


@dataclass
class Bench:
    """A loop on fakes, and what happened in it."""

    folder: Path
    executor: ThreadPoolExecutor
    max_steps: int = 2
    interval: int = 1
    max_staleness: int = 1
    warm: bool = True
    grace_s: float = 5.0
    order: Order = "arrival"
    on_nonfinite: OnNonFinite = "stop"
    filters: FilterOptions = NO_FILTERS
    settings: Mapping[str, Any] = field(default_factory=dict)
    sinks: MetricsFanout = field(default_factory=MetricsFanout)

    def __post_init__(self) -> None:
        self.events: list[str] = []
        self.backend = FakeBackend(self.folder, self.events)
        self.queue = FakeQueue(self.events, self.folder / "ledger.jsonl")
        self.status = TrainerStatus("r", self.max_steps)
        self.published: list[str] = []
        self.ledger, self.archive = FullLedger(self.folder / "ledger.jsonl"), FullArchive(self.folder / "archive", "r")

    def worker(self) -> TrainerWorker:
        async def warm_start() -> None:
            self.events.append("warm start")
            if not self.warm:
                self.status.stop()

        async def publish(published: PublishedVersion) -> list:
            self.events.append(f"publish {published.version}")
            return []

        parts = Collaborators(
            self.backend,
            self.backend,
            self.queue,
            self.ledger,
            self.archive,
            CommitLog(self.folder / "archive", "r"),
            StepLog(self.folder / "metrics.jsonl"),
            StepLog(self.folder / "handovers.jsonl"),
            Refusals(self.folder),
            self.executor,
            warm_start,
            publish,
            lambda: "anew",
            sinks=self.sinks,
        )
        rules = AdmissionRules(self.order, self.max_staleness, 32, 96, 2, self.filters)
        plan = TrainPlan(
            self.max_steps,
            2,
            self.interval,
            self.grace_s,
            0,
            False,
            rules,
            self.settings,
            on_nonfinite=self.on_nonfinite,
            env="frozen_lake",
        )
        return TrainerWorker(plan, parts, self.status)

    async def run_to_the_end(self) -> None:
        """Until the last step is durable; then it is stopped."""
        running = asyncio.ensure_future(self.worker().run())
        await self.until(lambda: self.status.phase == "done" or running.done())
        await stopped(running)

    def feed(self, *tickets: int, version: str = "e000001-s000000") -> None:
        for ticket in tickets:
            self.queue.put(group(ticket, version))

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(60):
            while not what():
                await asyncio.sleep(0.005)

    async def until_handed_over(self) -> None:
        """Wait until the first hand-over is on record."""
        path = self.folder / "handovers.jsonl"
        await self.until(lambda: path.exists() and path.stat().st_size)


async def stopped(running: asyncio.Future[None]) -> None:
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with ThreadPoolExecutor(1) as executor:
        yield Bench(tmp_path, executor)
