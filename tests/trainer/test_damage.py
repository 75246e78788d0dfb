"""The newest checkpoint is damaged: it is noticed, set aside, told; the run goes on from the one before and the log."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import orjson
import pytest

from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.loop.ledger import LedgerFile
from shared.errors import WeightsError
from shared.run import checkpoint_files, commits
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from tests.support import lies
from tests.support.small_run import RUN, STEPS, Incarnation, write_config
from tools.simulated.trainer import NumpyArrays
from volley_proof.verify import command


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as one:
        yield one


@pytest.fixture
def stopped_at_3(tmp_path: Path, executor: ThreadPoolExecutor) -> Path:
    """A run's folder after three steps on tickets 1 to 6."""
    folder = write_config(tmp_path / RUN)
    trainer = Incarnation(folder, executor)
    asyncio.run(trainer.run(lambda one: steps(one, range(3), epoch=1)))
    return folder


async def steps(trainer: Incarnation, before: range, epoch: int) -> None:
    """One step on fresh tokens after another."""
    for step in before:
        trainer.feed(2 * step + 1, 2 * step + 2, version=WeightVersion(epoch, step))
        await trainer.until(lambda status, step=step: status.durable_step == step + 1)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def remove(file: Path) -> None:
    file.unlink()


DAMAGES = [
    (damage, file)
    for damage in (flip, truncate, remove)
    for file in ("params/w.npy", "optimizer/optimizer.count.npy", "state.json")
]
DAMAGES += [(truncate, "manifest.json"), (flip, "manifest.json")]


@pytest.mark.parametrize(("damage", "file"), DAMAGES)
def test_the_run_goes_on_from_the_checkpoint_before(
    stopped_at_3: Path, executor: ThreadPoolExecutor, damage: Callable[[Path], None], file: str
):
    damage(stopped_at_3 / "checkpoints" / "e000001-s000003" / file)
    trainer = Incarnation(stopped_at_3, executor)
    asyncio.run(trainer.run(lambda one: steps(one, range(3, STEPS), epoch=2)))
    assert trainer.backend.weight == STEPS
    assert list(trainer.status.to_json()["set_aside"]) == ["e000001-s000003"]
    result = command.verify(RunFolder(stopped_at_3))
    assert result["ok"], result["violations"]
    assert list(result["set_aside"]) == ["e000001-s000003"]
    assert (result["undone"], result["superseded_archives"]) == ([], [])
    metrics = [orjson.loads(line) for line in (stopped_at_3 / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]


def test_without_a_whole_checkpoint_the_trainer_ends_and_nothing_begins_anew(
    stopped_at_3: Path, executor: ThreadPoolExecutor
):
    root = stopped_at_3 / "checkpoints"
    for version in checkpoint_files.versions(root):
        flip(root / str(version) / "state.json")
    before = sorted(path.name for path in root.iterdir())
    with pytest.raises(WeightsError, match=r"none of the 3 checkpoints .* is valid"):
        asyncio.run(Incarnation(stopped_at_3, executor).worker.run())
    assert sorted(path.name for path in root.iterdir()) == before
    assert len(LedgerFile(stopped_at_3 / "ledger.jsonl").settled()) == 6


def test_checkpoints_that_are_gone_end_the_trainer(stopped_at_3: Path, executor: ThreadPoolExecutor):
    root = stopped_at_3 / "checkpoints"
    for version in checkpoint_files.versions(root):
        (root / str(version) / checkpoint_files.MANIFEST).unlink()
    with pytest.raises(WeightsError, match="but there is no checkpoint"):
        asyncio.run(Incarnation(stopped_at_3, executor).worker.run())
    assert CheckpointFolders(root, RUN, 3, NumpyArrays()).newest() is None


@pytest.mark.parametrize("restarts", [0, 4])
def test_lines_of_metrics_that_a_retained_checkpoint_carries_are_put_back(
    stopped_at_3: Path, executor: ThreadPoolExecutor, restarts: int
):
    """Also by a trainer that goes on from a later one, and after as many starts without a step as there are checkpoints
    kept.
    """
    path = stopped_at_3 / "metrics.jsonl"

    def restart() -> None:
        asyncio.run(Incarnation(stopped_at_3, executor).run_until(lambda status: status.phase == "waiting"))

    for _ in range(restarts):
        restart()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0])
    restart()
    assert path.read_bytes().splitlines(keepends=True) == lines
    result = command.verify(RunFolder(stopped_at_3))
    assert result["ok"], result["violations"]


def test_a_torn_line_of_the_ledger_leaves_a_proven_run(stopped_at_3: Path, executor: ThreadPoolExecutor):
    path = stopped_at_3 / "ledger.jsonl"
    lines = path.read_bytes()
    path.write_bytes(lines + b'{"ticket":7,"dispo')
    asyncio.run(Incarnation(stopped_at_3, executor).run_until(lambda status: status.phase == "waiting"))
    assert path.read_bytes() == lines + b" " * 17 + b"\n"
    result = command.verify(RunFolder(stopped_at_3))
    assert result["ok"], result["violations"]


@pytest.mark.parametrize("harm", [flip, truncate, remove])
def test_the_newest_record_of_a_run_that_was_killed_is_damaged(
    stopped_at_3: Path, executor: ThreadPoolExecutor, harm: Callable[[Path], None]
) -> None:
    """There is no checkpoint of its step. The next start says that it is undone, and trains its groups again, once."""
    version = WeightVersion(1, 3)
    shutil.rmtree(stopped_at_3 / "checkpoints" / str(version))
    harm(commits.path_of(stopped_at_3 / "archive", version))
    trainer = Incarnation(stopped_at_3, executor)

    async def script(one: Incarnation) -> None:
        await one.until(lambda status: status.durable_step == 3)

    asyncio.run(trainer.run(script))
    assert str(version) in (trainer.status.branched or "")
    result = command.verify(RunFolder(stopped_at_3))
    assert (result["ok"], result["lost"], result["doubly_trained"]) == (True, 0, 0)
    assert {(one["step"], one["epoch"]) for one in result["undone"]} == {(3, 1)}
    settled = LedgerFile(stopped_at_3 / "ledger.jsonl").settled()
    assert {t for t, line in settled.items() if line["disposition"] == "trained"} == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("file", ["params/w.npy", "optimizer/optimizer.count.npy"])
@pytest.mark.parametrize("left", [{"saved"}, set[lies.Part]()])
def test_foreign_arrays_under_digests_made_anew_are_not_gone_on_from(
    stopped_at_3: Path, executor: ThreadPoolExecutor, file: str, left: set[lies.Part]
):
    """checkpoints.jsonl names another manifest; where that was made anew as well, the log's checksum is another."""
    path = stopped_at_3 / "checkpoints" / "e000001-s000003" / file
    path.unlink()
    np.save(path, np.float32(7.0))
    lies.Remake(RunFolder(stopped_at_3), frozenset(left))()
    trainer = Incarnation(stopped_at_3, executor)
    asyncio.run(trainer.run(lambda one: steps(one, range(3, STEPS), epoch=2)))
    assert trainer.backend.weight == STEPS
    assert list(trainer.status.to_json()["set_aside"]) == ["e000001-s000003"]
    result = command.verify(RunFolder(stopped_at_3))
    assert result["ok"], result["violations"]


def test_foreign_arrays_are_not_gone_on_from_where_no_commit_record_is_left(
    stopped_at_3: Path, executor: ThreadPoolExecutor
):
    path = stopped_at_3 / "checkpoints" / "e000001-s000003" / "params" / "w.npy"
    path.unlink()
    np.save(path, np.float32(7.0))
    lies.Remake(RunFolder(stopped_at_3))()
    for version in commits.versions(stopped_at_3 / "archive"):
        commits.path_of(stopped_at_3 / "archive", version).unlink()
    trainer = Incarnation(stopped_at_3, executor)
    asyncio.run(trainer.run_until(lambda status: status.phase == "waiting"))
    assert list(trainer.status.to_json()["set_aside"]) == ["e000001-s000003"]
    assert trainer.backend.weight in (2.0, 3.0), "of the older checkpoint, or with its next step"


def test_checkpoints_that_lost_their_lines_are_named_again_by_the_next_start(
    stopped_at_3: Path, executor: ThreadPoolExecutor
):
    (stopped_at_3 / "checkpoints.jsonl").unlink()
    assert not command.verify(RunFolder(stopped_at_3))["ok"]
    asyncio.run(Incarnation(stopped_at_3, executor).run_until(lambda status: status.phase == "waiting"))
    result = command.verify(RunFolder(stopped_at_3))
    assert result["ok"], result["violations"]
