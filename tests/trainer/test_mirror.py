"""Checkpoints in a bucket, over a server of S3's protocol: what is whole there, who may put it, and what a trainer
makes of it whose folder is gone.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.cli.runs.record import claimed, finished
from services.cli.verify.command import verify
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.groups.group_buffer import ready_group
from services.trainer.recovery import mirror as mirrors
from services.trainer.recovery.mirror import CheckpointMirror
from services.trainer.status import TrainerStatus
from shared.config import load
from shared.errors import Fenced, WeightsError
from shared.files.buckets import Bucket
from shared.queue.server import embedded_server
from shared.run import archive
from shared.run.commits import CommitLog
from shared.run.folder import RunFolder
from shared.run.state import TrainerState, epoch_of, initial_state
from shared.run.weights import MANIFEST
from shared.types import Group, WeightVersion
from tests.support.bucket import s3_server
from tests.trainer.process import BATCH, SIMULATED, producing, trainer
from tools.simulated.trainer import NumpyArrays, SimulatedBackend

STEPS = 12


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def bucket(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return Bucket(f"s3://volley/{tmp_path.parent.name}/{tmp_path.name}")


def mirror(bucket: Bucket, folder: Path, step: int, epoch: int = 1, reference: str | None = None) -> CheckpointMirror:
    """A run's folder with a checkpoint of `step`, and a log up to it."""
    run = RunFolder(folder)
    checkpoints = CheckpointFolders(run.checkpoints, "r", 2, NumpyArrays())
    checkpoints.fence(epoch)
    backend = SimulatedBackend(checkpoints, {}, 3, learning_rate=step)
    backend.build()
    state = initial_state(3).under(epoch, keep_reference=False)
    state = state.at(step, state.progress(), issued=0, done=False, chain=state.chain)
    state = replace(state, reference=reference)
    log, made = CommitLog(run.archive, "r"), archive.Archive(run.archive, "r")
    made.claim(epoch)
    log.fence(epoch)
    made.write(state.version, [b"group"])
    log.append(state, "checksum")
    with run.ledger.open("ab") as lines:
        lines.write(b'{"step": %d}\n' % step)
    backend.save(state, None)
    return CheckpointMirror(bucket, run)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_folder_that_is_lost_comes_back_as_it_was(bucket: Bucket, tmp_path: Path) -> None:
    made = mirror(bucket, tmp_path / "r", 5)
    made.keep(WeightVersion(1, 5))
    before = tree(tmp_path / "r")
    shutil.rmtree(tmp_path / "r")
    assert made.restore() == WeightVersion(1, 5)
    assert tree(tmp_path / "r") == before
    assert made.restore() is None  # nothing to do


async def test_a_bucket_that_is_away_gets_it_later(bucket: Bucket, tmp_path: Path) -> None:
    """A bucket that is away for a while is asked again."""
    made, status = mirror(bucket, tmp_path / "r", 1), TrainerStatus("r", 9)
    away, bucket.address = bucket.address, "s3://nowhere"
    async with made.running(status):
        made.wanted(WeightVersion(1, 1))
        while "there is no such bucket" not in (status.waiting_for or ""):
            await asyncio.sleep(0.01)
        bucket.address = away
        made.wanted(WeightVersion(1, 1))
    assert [key.split("/")[1] for key in bucket.keys("checkpoints") if key.endswith(MANIFEST)] == ["e000001-s000001"]
    assert status.waiting_for is None


def test_what_is_not_retained_is_removed_after_a_newer_one_is_whole(bucket: Bucket, tmp_path: Path) -> None:
    for step in range(4):
        mirror(bucket, tmp_path / "r", step).keep(WeightVersion(1, step))
    names = {key.split("/")[1] for key in bucket.keys("checkpoints")}
    assert names == {key.split("/")[1] for key in bucket.keys("logs")} == {"e000001-s000002", "e000001-s000003"}
    assert len(bucket.keys("archive")) == 8


@pytest.mark.long
def test_a_start_that_is_killed_while_it_fetches_goes_on(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the names of the two checkpoints that it needs: the reference alone is not gone on from."""
    for step in (1, 2):
        made = mirror(bucket, tmp_path / "r", step, reference="e000001-s000001")
        made.keep(WeightVersion(1, step))
    before = tree(tmp_path / "r")
    for n in range(100):
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        with monkeypatch.context() as patch:
            died = dying(patch, n)
            with suppress(Died):
                made.restore()
            if not died:
                break
        assert made.restore() == WeightVersion(1, 2)
        assert tree(tmp_path / "r") == before
    assert n > 8


class Died(BaseException):
    """In place of a kill."""


def dying(patch: pytest.MonkeyPatch, n: int) -> list[int]:
    """After `n` files are durable or renamed; the list then is not empty."""
    done, died = count(), list[int]()

    def once(call: Callable[..., Any]) -> Callable[..., Any]:
        def dies(*args: Any, **kwargs: Any) -> Any:
            if next(done) == n:
                died.append(n)
                raise Died
            return call(*args, **kwargs)

        return dies

    patch.setattr(mirrors, "fsync", once(mirrors.fsync))
    patch.setattr(Path, "rename", once(Path.rename))
    return died


def test_a_damaged_one_is_passed_over(bucket: Bucket, tmp_path: Path) -> None:
    for step in (1, 2):
        made = mirror(bucket, tmp_path / "r", step)
        made.keep(WeightVersion(1, step))
    key = next(key for key in bucket.keys("checkpoints/e000001-s000002/params"))
    bucket.upload(key, bytes(len(bucket.read(key, 2**20))))
    shutil.rmtree(tmp_path / "r")
    assert made.restore() == WeightVersion(1, 1)
    shutil.rmtree(tmp_path / "r")
    bucket.remove([key.replace("s000002", "s000001")])
    with pytest.raises(WeightsError, match="none of the 2 checkpoints"):
        made.restore()


def test_an_epoch_belongs_to_one_trainer(bucket: Bucket, tmp_path: Path) -> None:
    first, second = mirror(bucket, tmp_path / "a", 1), mirror(bucket, tmp_path / "b", 1)
    assert (first.last_epoch(), first.claim(1), second.claim(1), second.claim(2)) == (0, True, False, True)
    assert first.last_epoch() == 2


def test_a_trainer_that_was_replaced_keeps_nothing_there(bucket: Bucket, tmp_path: Path) -> None:
    older = mirror(bucket, tmp_path / "a", 1)
    assert older.claim(1)
    assert mirror(bucket, tmp_path / "b", 1).claim(2)
    with pytest.raises(Fenced):
        older.keep(WeightVersion(1, 1))
    assert not [key for key in bucket.keys("checkpoints") if key.endswith(MANIFEST)]


def test_a_version_that_was_removed_is_named(bucket: Bucket, tmp_path: Path) -> None:
    made = mirror(bucket, tmp_path / "r", 1)
    with pytest.raises(WeightsError):
        made.keep(WeightVersion(1, 0))


def test_nobody_overwrites_a_version(bucket: Bucket, tmp_path: Path) -> None:
    """Not even one that has the same epoch; the same manifest is its own, whose answer was lost."""
    made = mirror(bucket, tmp_path / "a", 1)
    made.keep(WeightVersion(1, 1))
    made.keep(WeightVersion(1, 1))
    before = bucket.read(f"checkpoints/e000001-s000001/{MANIFEST}", 2**20)
    with pytest.raises(Fenced, match="is there already, and another one"):
        mirror(bucket, tmp_path / "b", 1).keep(WeightVersion(1, 1))
    assert bucket.read(f"checkpoints/e000001-s000001/{MANIFEST}", 2**20) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from services.trainer.recovery.mirror import CheckpointMirror
from shared.files.buckets import Bucket
from shared.run.folder import RunFolder
from shared.types import WeightVersion

class Dying(Bucket):
    n = 0
    def upload(self, key, source, *, new=False):
        if self.n == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        self.n += 1
        super().upload(key, source, new=new)

CheckpointMirror(Dying(sys.argv[1]), RunFolder(Path(sys.argv[2]))).keep(WeightVersion(1, 2))
"""


@pytest.mark.long
def test_killed_between_any_two_objects_it_leaves_the_one_before(bucket: Bucket, tmp_path: Path) -> None:
    mirror(bucket, tmp_path / "r", 1).keep(WeightVersion(1, 1))
    whole = mirror(bucket, tmp_path / "r", 2)
    shutil.copytree(tmp_path / "r", tmp_path / "made")
    for n in range(100):
        command = [sys.executable, "-c", KILLED, bucket.address, str(tmp_path / "made"), str(n)]
        code = subprocess.run(command, check=False, timeout=120).returncode
        shutil.rmtree(tmp_path / "r")
        found = whole.restore()
        assert found == WeightVersion(1, 1 if code else 2)
        assert (tmp_path / "r" / "ledger.jsonl").read_bytes().count(b"\n") == (1 if code else 2)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert n > 8  # groups, records, lines, arrays, state, manifest
    assert {k: v for k, v in tree(tmp_path / "r").items() if "s000001" not in k} == {
        k: v for k, v in tree(tmp_path / "made").items() if "s000001" not in k
    }


def test_a_trainer_goes_on_without_its_folder(bucket: Bucket, tmp_path: Path) -> None:
    """Killed, and its folder removed: the run is proven in the end, and its log, also of the steps before, gives its
    weights.
    """
    options = {
        "run__bucket": bucket.address,
        "trainer__max_steps": STEPS,
        "trainer__checkpointing_options": {"save_interval_steps": 3},
    }
    with (
        embedded_server(tmp_path / "redis") as spec,
        producing(spec.url, STEPS * BATCH),
        trainer(tmp_path, spec.url, SIMULATED, **options) as process,
    ):
        process.wait(lambda s: _is_kept(bucket, 3))
        process.kill()
        shutil.rmtree(tmp_path / "r")
        process.start()
        process.wait(lambda s: s["phase"] == "done")
        assert process.terminate() == 0
    newest = CheckpointFolders(tmp_path / "r" / "checkpoints", "r", 3, NumpyArrays()).newest()
    assert newest is not None
    assert (newest.state.epoch, newest.state.step) == (2, STEPS)
    expected = trained_again(tmp_path, newest.state)
    assert all(np.array_equal(newest.params[name], expected[name]) for name in expected)
    assert _is_kept(bucket, STEPS)
    with claimed(load([tmp_path / "config.yaml"])) as claim:
        finished(claim.folder, claim.record)
    result = verify(claim.folder)
    assert result["ok"], result["violations"]


def trained_again(folder: Path, state: TrainerState) -> dict[str, np.ndarray]:
    """From the first step on, by the archive."""
    rate = load([folder / "config.yaml"]).config.trainer.optimizer_config.learning_rate
    backend = SimulatedBackend(CheckpointFolders(folder / "again", "r", 3, NumpyArrays()), {}, 3, learning_rate=rate)
    backend.build()
    for step in range(1, state.step + 1):
        made = WeightVersion(epoch_of(step, state.lineage) or 0, step)
        groups = [Group.decode(payload) for payload in archive.read(folder / "r" / "archive", "r", made)]
        backend.step([ready_group(one, b"", "") for one in groups], WeightVersion(made.epoch, step - 1))
    return backend.params


def _is_kept(bucket: Bucket, step: int) -> bool:
    found = [WeightVersion.of_name(key.split("/")[1]) for key in bucket.keys("checkpoints") if key.endswith(MANIFEST)]
    return any(version is not None and version.step >= step for version in found)
