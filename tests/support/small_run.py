"""A run's folder as the trainer's own loop leaves it, without a model: the weights are one number, steps take no time.

Two incarnations, five steps of two groups, one failed and one stale ticket; groups are a pure function of ticket and
version.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.groups.group_buffer import AdmissionRules, ReadyGroup
from services.trainer.interfaces import OnNonFinite, TrainPlan, TrainQueue
from services.trainer.loop.collaborators import Collaborators
from services.trainer.loop.ledger import LedgerFile
from services.trainer.loop.refusals import Refusals
from services.trainer.loop.worker import TrainerWorker
from services.trainer.metrics.step_metrics import StepMetrics, of_groups
from services.trainer.models.arrays import CheckpointContents, RestoredCheckpoint
from services.trainer.publishing.publications import PublishedVersion
from services.trainer.settings import filter_options
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from shared.config import load
from shared.errors import NonFinite
from shared.published.manifest import Chunk
from shared.queue.records import StreamEntry
from shared.run import checksums, pinned
from shared.run.archive import Archive
from shared.run.checkpoint_files import ManifestLeaf
from shared.run.commits import CommitLog
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.schema import RunConfig
from shared.types import Branch, Group, Lineage, Trajectory, VersionSpan, WeightVersion
from tools.simulated.trainer import NumpyArrays
from volley.runs.record import claimed, mark_finished
from volley_proof.replay.log_queue import bounds_of, log_of
from volley_python.folder import forks
from volley_python.folder.forks import Fork

RUN, BATCH, SIZE, ETA, STEPS = "r", 2, 2, 1, 5
HUGE = 1e6


def step_metrics(held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
    """Of a step after `before` whose learner measures nothing."""
    after = WeightVersion(before.epoch, before.step + 1)
    n_tokens = sum(one.n_sampled for h in held for one in h.group.trajectories)
    told: dict[str, Any] = {
        "step": after.step,
        "version": str(after),
        "tokens": n_tokens,
        **of_groups(held, before.step),
    }
    measured = [one.name for one in fields(StepMetrics) if one.default_factory is MISSING]
    return StepMetrics(**dict.fromkeys(measured, 0.0) | told)


def group(ticket: int, version: WeightVersion, *, reward: float = 0.0) -> Group:
    return Group(
        ticket, "toy", f"train/{ticket}", tuple(_trajectory(ticket, i, version, reward + i) for i in range(SIZE))
    )


def _trajectory(ticket: int, sample_index: int, version: WeightVersion, reward: float) -> Trajectory:
    rng = np.random.default_rng([ticket, sample_index])
    mask = np.array([0, 0, 0, 1, 1, 1, 0, 1, 1], np.uint8)
    logprobs = np.where(mask, -rng.exponential(1.0, 9), 0).astype(np.float32)
    spans = (VersionSpan(str(version), 3, 6), VersionSpan(str(version), 7, 9))
    ids = rng.integers(1, 90, 9).astype(np.int32)
    branches = (_branch(ids, version),) if sample_index else ()
    return Trajectory(
        ticket,
        sample_index,
        0,
        "toy",
        f"train/{ticket}",
        3,
        ids,
        mask,
        logprobs,
        spans,
        (),
        reward,
        reward > 0,
        "completed",
        branches=branches,
    )


def _branch(ids: np.ndarray, version: WeightVersion) -> Branch:
    """Another answer after the episode's first."""
    logprobs = np.array([0, -1, -2], np.float32)
    return Branch(0, 6, ids[:3], np.array([0, 1, 1], np.uint8), logprobs, (VersionSpan(str(version), 7, 9),), ())


class Weightless:
    """The loop's backend: the one weight is the number of steps, and so is the state of the optimizer."""

    def __init__(self, checkpoints: CheckpointFolders) -> None:
        self._checkpoints, self.weight, self.count = checkpoints, 0.0, 0.0
        self._restored: RestoredCheckpoint | None = None
        self.share = 1.0
        self.memory: Mapping[str, float] = {}
        self.plan = ""
        self.restored, self.may_build, self.may_start, self.may_save = (threading.Event() for _ in range(4))
        for may in (self.may_build, self.may_start, self.may_save):
            may.set()

    def restore(self) -> TrainerState | None:
        self._restored = self._checkpoints.newest()
        self.restored.set()
        return self._restored.state if self._restored else None

    def build(self) -> None:
        assert self.may_build.wait(60)
        self.weight = float(self._restored.params["w"]) if self._restored else 0.0
        self.count = float(self._restored.optimizer["count"]) if self._restored else 0.0

    def start(self, state: TrainerState) -> Path:
        assert self.may_start.wait(60)
        return self._checkpoints.relabel(self._restored, state) if self._restored else self.save(state, None)

    def publish(self, version: WeightVersion) -> PublishedVersion:
        return PublishedVersion(version, Chunk("0" * 64, 1), "0" * 64, 1, 0, {})

    def compile(self) -> None: ...

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics:
        """A reward above `HUGE` makes the weight infinite."""
        if any(t.reward > HUGE for h in held for t in h.group.trajectories):
            self.weight = np.inf
            raise NonFinite("not finite", what=["w"])
        self.weight += 1
        self.count += 1
        return step_metrics(held, before)

    def apply_settings(self, settings: Mapping[str, Any]) -> None: ...

    def checksum(self) -> str:
        return str(self.weight)

    def checksums(self) -> Mapping[str, str]:
        described = checksums.description({}, [ManifestLeaf("w", (), "float32")], None, None)
        return {"params": self.checksum(), "optimizer": str(self.count), "description": described}

    def logprob_diffs(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[float | None]:
        return [None for _ in held]

    def spot_check(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[Any]:
        return []

    def effective_share(self, held: Sequence[ReadyGroup], present: WeightVersion) -> float:
        return self.share

    def rewind(self, version: WeightVersion) -> None:
        restored = self._checkpoints.restored(version)
        self.weight, self.count = float(restored.params["w"]), float(restored.optimizer["count"])

    def save(self, state: TrainerState, base: WeightVersion | None) -> Path:
        return self._written(state, self._contents(), base)

    def take(self, state: TrainerState, base: WeightVersion) -> Callable[[], Path]:
        contents = self._contents()
        return lambda: self._written(state, contents, base)

    def _contents(self) -> CheckpointContents:
        return CheckpointContents({"w": np.float32(self.weight)}, {"count": np.float32(self.count)}, None, {}, None)

    def _written(self, state: TrainerState, contents: CheckpointContents, base: WeightVersion | None) -> Path:
        assert self.may_save.wait(60)
        return self._checkpoints.save(state, contents, base)


@dataclass
class SmallRun:
    """The loop's queue: each entry is given once, to the first incarnation that reads it."""

    entries: list[Group] = field(default_factory=list)

    async def begin(self, low: int, version: int, issued: int, void: int, done: Any, epoch: int, above: int) -> int:
        return max(epoch, above) + 1

    async def open(self, epoch: int, incarnations: Lineage = (), run_id: str = "") -> None: ...

    async def read(self, epoch: int, consumer: str, count: int, block_ms: int) -> list[StreamEntry]:
        await asyncio.sleep(0.002)
        given, self.entries = self.entries[:count], self.entries[count:]
        return [StreamEntry(f"{g.ticket}-0", g.ticket, g.encode(), 1) for g in given]

    async def commit(self, epoch: int, version: int, finished: Any, void: int) -> None: ...

    async def dead_letter(self, epoch: int, entry: StreamEntry, reason: str) -> None: ...

    async def leave(self, epoch: int, refused: str = "") -> None: ...

    async def publish(self, ticket: int, payload: bytes) -> None:
        self.entries.append(Group.decode(payload))


class Incarnation:
    """One trainer on the folder."""

    def __init__(
        self,
        folder: Path,
        executor: ThreadPoolExecutor,
        *,
        max_to_keep: int = 3,
        queue: TrainQueue | None = None,
        config: RunConfig | None = None,
        on_nonfinite: OnNonFinite = "stop",
        fork: Fork | None = None,
    ) -> None:
        run = config or load([folder / "config.yaml"]).config
        steps, name = run.trainer.max_steps, run.run.name
        self.queue, self.status = SmallRun(), TrainerStatus(name, steps)
        log = None if fork is None else log_of(fork, RunFolder(folder))
        logs = StepLog(folder / "metrics.jsonl"), StepLog(folder / "handovers.jsonl"), Refusals(folder)
        checkpoints = CheckpointFolders(folder / "checkpoints", name, max_to_keep, NumpyArrays())
        ledger, archive = LedgerFile(folder / "ledger.jsonl"), Archive(folder / "archive", name)
        self.backend = Weightless(checkpoints)
        parts = Collaborators(
            self.backend,
            checkpoints,
            log or queue or self.queue,
            ledger,
            archive,
            CommitLog(folder / "archive", name),
            *logs,
            executor,
            _nothing,
            _published,
            lambda: "anew",
            log=None if fork is None or log is None else bounds_of(fork, self.backend, log),
        )
        filters = filter_options(run.trainer.filters, run.algorithm.mask_truncated)
        rules = AdmissionRules("arrival", ETA, 32, 96, SIZE, filters)
        settings = pinned.relevant(run)
        self.worker = TrainerWorker(
            replace(
                TrainPlan(steps, BATCH, 1, 5.0, 0, False, rules, settings, None, on_nonfinite, env="toy"),
                forks=fork.points if fork else (),
                free=forks.FREE if fork else (),
            ),
            parts,
            self.status,
        )

    def feed(self, *tickets: int, version: WeightVersion) -> None:
        self.queue.entries += [group(ticket, version) for ticket in tickets]

    async def run(self, script: Callable[[Incarnation], Awaitable[None]]) -> None:
        """Runs `script` beside the loop, then stops it; a loop that fails first ends both."""
        running, scripted = asyncio.ensure_future(self.worker.run()), asyncio.ensure_future(script(self))
        await asyncio.wait({running, scripted}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            scripted.cancel()
            await running
        await scripted
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    async def run_until(self, what: Callable[[TrainerStatus], object]) -> None:
        await self.run(lambda one: one.until(what))

    async def until(self, what: Callable[[TrainerStatus], object]) -> None:
        async with asyncio.timeout(60):
            while not what(self.status):
                await asyncio.sleep(0.002)


def make(folder: Path, *, max_to_keep: int = 3) -> Path:
    """Makes the run of this module; returns its folder."""
    write_config(folder)
    with claimed(load([folder / "config.yaml"])) as claim, ThreadPoolExecutor(1) as executor:
        asyncio.run(Incarnation(folder, executor, max_to_keep=max_to_keep).run(_first))
        asyncio.run(Incarnation(folder, executor, max_to_keep=max_to_keep).run(_second))
        mark_finished(claim.folder, claim.record)
    return folder


def write_config(folder: Path) -> Path:
    """Makes the folder with the run's configuration and record."""
    folder.mkdir(parents=True)
    tree = {
        "run": {"name": RUN, "dir": str(folder.parent)},
        "model": {"path": "tiny"},
        "data": {"env": "toy"},
        "grpo_config": {"num_generations": SIZE, "off_policy_steps": ETA},
        "trainer": {"max_steps": STEPS, "groups_per_step": BATCH},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    with claimed(load([folder / "config.yaml"])):
        return folder


async def _first(trainer: Incarnation) -> None:
    trainer.feed(2, 1, 4, version=WeightVersion(1, 0))
    trainer.queue.entries.append(Group(3, "toy", "train/3", (), failure="Timeout"))
    trainer.feed(6, version=WeightVersion(1, 0))
    await trainer.until(lambda status: status.durable_step == 2 and status.phase == "waiting")


async def _second(trainer: Incarnation) -> None:
    trainer.feed(5, version=WeightVersion(1, 0))
    trainer.feed(7, 8, version=WeightVersion(2, 2))
    await trainer.until(lambda status: status.durable_step == 3)
    trainer.feed(9, 10, version=WeightVersion(2, 3))
    await trainer.until(lambda status: status.durable_step == 4)
    trainer.feed(11, 12, version=WeightVersion(2, 3))
    await trainer.until(lambda status: status.phase == "done")


async def _nothing() -> None: ...


async def _published(folder: Path) -> list[Any]:
    return []
