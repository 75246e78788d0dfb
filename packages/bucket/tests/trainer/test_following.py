"""The bucket follows a trainer at work, up to its end."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packages.bucket.tests.trainer.runs import RUN_ID, Run, anything, head, restore, writer
from services.trainer.loop.pending import PendingWork
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.errors import ConfigError, Unavailable
from shared.queue.records import QueueState
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from volley_bucket.objects import Bucket
from volley_bucket.run.head import HEAD, MAX_BYTES
from volley_bucket.run.restore import FolderRestore
from volley_bucket.run.run_bucket import RunBucket


def queue_state(step: int, epoch: int) -> QueueState:
    return QueueState(0, 0, step, epoch, True, 0, 0, 0, 0, 0, 0, 0, 0)


async def never_behind() -> QueueState:
    return queue_state(0, 0)


class SlowBucket(Bucket):
    """Takes no groups until it is told to."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.goes_on = threading.Event()

    def upload(self, key: str, source: Any) -> None:
        if key.startswith("archive/"):
            self.goes_on.wait()
        super().upload(key, source)


async def _following(run: Run, slow: SlowBucket, end_s: float) -> tuple[RunBucket, TrainerStatus, asyncio.Task[None]]:
    """A run that has made its last step, and whose bucket is behind."""
    run.step(save=True)
    assert run.saved is not None
    status = TrainerStatus("r", 1, phase="done")
    one = FolderRestore(slow, run.folder, "r", lambda: RUN_ID, 2**20, 2**20, anything)
    followed = RunBucket(one, writer(slow, run.folder), run.folder, status, end_s)
    pending = PendingWork(run.state, run.saved)
    following = asyncio.create_task(followed.follow(lambda: pending, 1))
    async with asyncio.timeout(60):
        while not status.waits:
            await asyncio.sleep(0.05)
    return followed, status, following


async def test_the_end_waits_for_a_bucket_that_is_behind(bucket: Bucket, tmp_path: Path) -> None:
    """And says so meanwhile."""
    slow = SlowBucket(bucket.address)
    run = Run(tmp_path / "r", bucket)
    followed, status, following = await _following(run, slow, 600.0)
    assert "the run's bucket, which has step None of 1: on its way" in str(status.waiting_for)
    followed.stop()
    slow.goes_on.set()
    await following
    assert status.bucket_step == 1
    assert status.waiting_for is None
    assert head(bucket).version == WeightVersion(1, 1)


async def test_the_end_waits_for_a_bucket_no_longer_than_it_may(bucket: Bucket, tmp_path: Path) -> None:
    slow = SlowBucket(bucket.address)
    run = Run(tmp_path / "r", bucket)
    followed, status, following = await _following(run, slow, 0.05)
    followed.stop()
    async with asyncio.timeout(60):
        await following
    assert status.bucket_step is None
    assert status.waiting_for is None
    assert head(bucket).version is None
    slow.goes_on.set()


async def test_a_stop_ends_a_start_that_waits_for_its_bucket(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path / "r", bucket).upload()
    goes_on, status = threading.Event(), TrainerStatus("r", 1)
    new = RunFolder(tmp_path / "new" / "r")
    one = FolderRestore(bucket, new, "r", lambda: RUN_ID, 2**20, 2**20, anything)
    followed = RunBucket(one, writer(bucket, new), new, status, 600.0)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "read_tagged", lambda *_: goes_on.wait() and None)
        starting = asyncio.create_task(followed.restore(never_behind))
        while not status.limits:
            await asyncio.sleep(0.01)
        assert "which the empty folder is restored from" in (status.waiting_for or "")
        status.stop()
        with pytest.raises(Unavailable, match="did not answer before the stop"):
            await starting
        goes_on.set()


@pytest.mark.parametrize("later", ["epoch", "version"])
@pytest.mark.parametrize("how", ["deaf", "away", "lost"])
async def test_a_folder_that_is_behind_the_queue_waits_for_its_bucket(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, later: str
) -> None:
    """The run may have gone on from another folder; one that knows all that the queue does starts at once."""
    run = Run(tmp_path / "r", bucket)
    run.upload()
    restore(bucket, tmp_path / "new" / "r")
    of_other = bucket.read(HEAD, MAX_BYTES)
    goes_on, status, is_behind = threading.Event(), TrainerStatus("r", 1), 0

    async def asked() -> QueueState:
        known = queue_state(run.state.step, run.epoch)
        return replace(known, **{later: getattr(known, later) + is_behind})

    def deaf(self: Bucket, *args: Any) -> Any:
        if not goes_on.is_set() and how == "away":
            raise Unavailable("it does not answer")
        if how == "deaf":
            goes_on.wait()
        return real(self, *args)

    if how == "lost":
        bucket.remove([HEAD])
    one, real = FolderRestore(bucket, run.folder, "r", lambda: RUN_ID, 2**20, 2**20, anything), Bucket.read_tagged
    followed = RunBucket(one, writer(bucket, run.folder), run.folder, status, 600.0)
    monkeypatch.setattr(Bucket, "read_tagged", deaf)
    monkeypatch.setattr("volley_bucket.run.run_bucket._CHECK_S", 0.05)
    assert await followed.restore(asked) is None
    is_behind, waits = 1, Waiter(ThreadPoolExecutor(1), status)
    starting = asyncio.create_task(waits.retry_until_stopped(lambda: followed.restore(asked)))
    expected = "does not answer" if how == "away" else "the queue knows of a later trainer"
    async with asyncio.timeout(60):
        while expected not in str(status.waiting_for):
            await asyncio.sleep(0.01)
    bucket.upload(HEAD, of_other)
    goes_on.set()
    with pytest.raises(ConfigError, match="has continued from another folder"):
        await starting


async def test_the_status_names_no_step_of_a_bucket_that_lost_its_head(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    slow = SlowBucket(bucket.address)
    followed, status, following = await _following(run, slow, 600.0)
    slow.goes_on.set()
    async with asyncio.timeout(60):
        while status.bucket_step != 1:
            await asyncio.sleep(0.01)
    slow.goes_on.clear()
    bucket.remove([HEAD])
    run.folder.evals.write_bytes(b"{}\n")
    async with asyncio.timeout(60):
        while status.bucket_step is not None:
            await asyncio.sleep(0.01)
    assert followed.needed_step == 0
    slow.goes_on.set()
    followed.stop()
    await following
    assert status.bucket_step == 1
