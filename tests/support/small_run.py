"""A run's folder as the trainer's own loop leaves it, without a model: weights are a number of bytes, steps take no time.

Two incarnations, five steps of two groups, one failed and one stale ticket; groups are a pure function of ticket and version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from services.trainer.board import Board
from services.trainer.intake import Held, Rules
from services.trainer.loop import Loop
from services.trainer.metrics import StepMetrics, of_groups
from services.trainer.parts import Parts, Plan
from services.trainer.records import Ledger, StepLog
from shared import state as states
from shared import weights
from shared.archive import Archive
from shared.queue.records import Entry
from shared.state import OPTIMIZER, TrainerState
from shared.types import Group, Trajectory, VersionSpan, WeightVersion
from shared.weights import Leaf, Manifest

RUN, BATCH, SIZE, ETA, STEPS = "r", 2, 2, 1, 5
_NUMBERS = (
    "loss",
    "grad_norm",
    "kl",
    "logprob_abs_diff",
    "logprob_abs_diff_current",
    "logprob_abs_diff_current_max",
    "clip_fraction",
    "entropy",
)


def group(ticket: int, version: WeightVersion, *, reward: float = 0.0) -> Group:
    return Group(ticket, "toy", f"train/{ticket}", tuple(_trajectory(ticket, i, version, reward + i) for i in range(SIZE)))


def _trajectory(ticket: int, sibling: int, version: WeightVersion, reward: float) -> Trajectory:
    rng = np.random.default_rng([ticket, sibling])
    mask = np.array([0, 0, 0, 1, 1, 1, 0, 1, 1], np.uint8)
    logprobs = np.where(mask, -rng.exponential(1.0, 9), 0).astype(np.float32)
    spans = (VersionSpan(str(version), 3, 6), VersionSpan(str(version), 7, 9))
    ids = rng.integers(1, 90, 9).astype(np.int32)
    return Trajectory(ticket, sibling, 0, "toy", f"train/{ticket}", 3, ids, mask, logprobs, spans, (), reward, reward > 0, "completed")


def write_checkpoint(root: Path, state: TrainerState, base: WeightVersion | None) -> Path:
    folder = root / str(state.version)
    for part in ("params", OPTIMIZER):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "d").write_bytes(f"{part} {state.step}".encode())
    (folder / states.STATE).write_bytes(state.to_json(optimizer_files=weights.digest_files(folder, OPTIMIZER)))
    files, tree = weights.digest_files(folder, "params"), (Leaf("w", (1,), "float32"),)
    base_version = None if base is None else str(base)
    digest = weights.digest(folder / states.STATE)
    manifest = Manifest(RUN, str(state.version), base_version, state.step, "full", "params", files, tree, {}, None, time.time(), digest)
    weights.write_manifest(folder, manifest)
    return folder


@dataclass
class Weightless:
    """The loop's backend."""

    root: Path

    def restore(self) -> TrainerState | None:
        found = weights.newest(self.root)
        return states.read(found)[0] if found else None

    def build(self) -> None: ...

    def start(self, state: TrainerState) -> Path:
        return write_checkpoint(self.root, state, None)

    def step(self, held: Sequence[Held], before: WeightVersion) -> StepMetrics:
        after = WeightVersion(before.epoch, before.step + 1)
        return StepMetrics(step=after.step, version=str(after), tokens=1, **of_groups(held, before.step), **dict.fromkeys(_NUMBERS, 0.0))

    def save(self, state: TrainerState, base: WeightVersion | None) -> Path:
        return write_checkpoint(self.root, state, base)


@dataclass
class Given:
    """The loop's queue: each entry is given once, to the first incarnation that reads it."""

    entries: list[Group] = field(default_factory=list)

    async def begin(self, low: int, version: int, issued: int, void: int, done: Any, epoch: int) -> int:
        return epoch + 1

    async def read(self, epoch: int, consumer: str, count: int, block_ms: int) -> list[Entry]:
        await asyncio.sleep(0.002)
        given, self.entries = self.entries[:count], self.entries[count:]
        return [Entry(f"{g.ticket}-0", g.ticket, g.encode(), 1) for g in given]

    async def commit(self, epoch: int, version: int, finished: Any, void: int) -> None: ...

    async def dead_letter(self, epoch: int, entry: Entry, reason: str) -> None: ...


class Incarnation:
    """One trainer on the folder."""

    def __init__(self, folder: Path, executor: ThreadPoolExecutor, interval: int = 1) -> None:
        self.queue, self.board = Given(), Board(RUN, STEPS)
        logs = [StepLog(folder / f"{name}.jsonl") for name in ("metrics", "handovers")]
        backend = Weightless(folder / "checkpoints")
        ledger, archive = Ledger(folder / "ledger.jsonl"), Archive(folder / "archive", RUN)
        parts = Parts(backend, self.queue, ledger, archive, *logs, executor, _nothing, _published)
        rules = Rules("arrival", ETA, 32, 96, SIZE)
        self._loop = Loop(Plan(STEPS, BATCH, interval, 5.0, 0, False, rules), parts, self.board)

    def feed(self, *tickets: int, version: WeightVersion) -> None:
        self.queue.entries += [group(ticket, version) for ticket in tickets]

    async def run(self, script: Callable[[Incarnation], Awaitable[None]]) -> None:
        """Runs `script` beside the loop, then stops it."""
        running = asyncio.ensure_future(self._loop.run())
        await script(self)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    async def until(self, what: Callable[[Board], object]) -> None:
        async with asyncio.timeout(10):
            while not what(self.board):
                await asyncio.sleep(0.002)


def make(folder: Path, *, max_to_keep: int = 3) -> Path:
    """Makes the run of this module; returns its folder."""
    folder.mkdir(parents=True)
    tree = {
        "run": {"name": RUN, "dir": str(folder.parent)},
        "model": {"path": "tiny"},
        "data": {"env": "toy"},
        "grpo_config": {"num_generations": SIZE, "off_policy_steps": ETA},
        "trainer": {"max_steps": STEPS, "groups_per_step": BATCH},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    with ThreadPoolExecutor(1) as executor:
        asyncio.run(Incarnation(folder, executor).run(_first))
        asyncio.run(Incarnation(folder, executor).run(_second))
    for version in weights.versions(folder / "checkpoints")[:-max_to_keep]:
        (folder / "checkpoints" / str(version) / weights.MANIFEST).unlink()
    return folder


async def _first(trainer: Incarnation) -> None:
    trainer.feed(2, 1, 4, version=WeightVersion(1, 0))
    trainer.queue.entries.append(Group(3, "toy", "train/3", (), failure="Timeout"))
    trainer.feed(6, version=WeightVersion(1, 0))
    await trainer.until(lambda board: board.durable_step == 2 and board.phase == "waiting")


async def _second(trainer: Incarnation) -> None:
    trainer.feed(5, version=WeightVersion(1, 0))
    trainer.feed(7, 8, version=WeightVersion(2, 2))
    await trainer.until(lambda board: board.durable_step == 3)
    trainer.feed(9, 10, version=WeightVersion(2, 3))
    await trainer.until(lambda board: board.durable_step == 4)
    trainer.feed(11, 12, version=WeightVersion(2, 3))
    await trainer.until(lambda board: board.phase == "done")


async def _nothing() -> None: ...


async def _published(folder: Path) -> list[Any]:
    return []
