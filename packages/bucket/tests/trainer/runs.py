"""Runs whose folders a bucket follows, and buckets that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.loop.ledger import LedgerFile
from shared.errors import NotFound
from shared.run import archive, ledger
from shared.run.commits import CommitLog
from shared.run.folder import RunFolder
from shared.run.state import TrainerState, initial_state
from shared.types import WeightVersion
from tools.simulated.trainer import NumpyArrays, SimulatedBackend
from volley_bucket.objects import Bucket
from volley_bucket.run.head import HEAD, MAX_BYTES, BucketHead
from volley_bucket.run.restore import FolderRestore
from volley_bucket.run.writer import BucketWriter

RUN_ID = "0123456789abcdef"


class Run:
    """A run's folder, with a step at each call of `step`, and what follows it."""

    def __init__(self, path: Path, bucket: Bucket, epoch: int = 1, name: str = "r") -> None:
        self.folder, self.name, self.bucket = RunFolder(path), name, bucket
        self.checkpoints = CheckpointFolders(self.folder.checkpoints, name, 2, NumpyArrays())
        self.state = initial_state(3)
        self.saved: WeightVersion | None = None
        self.followed = 0
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        """The next incarnation."""
        self.archive = archive.Archive(self.folder.archive, self.name)
        self.commits = CommitLog(self.folder.archive, self.name)
        assert self.archive.claim(epoch)
        self.commits.fence(epoch)
        self.checkpoints.fence(epoch)
        self.state = self.state.starting_epoch(epoch, keep_reference=False)
        self.save()
        self.writer = writer(self.bucket, self.folder, self.name)
        self.epoch = epoch

    def step(self, *, save: bool = False) -> None:
        version = WeightVersion(self.epoch, self.state.step + 1)
        self.archive.write(version, [f"group of {version}".encode()])
        lines = (ledger.line(version.step, ledger.TRAINED, version),)
        state = self.state.at(
            version.step, self.state.progress(), issued=version.step, done=False, chain=self.state.chain, recent=lines
        )
        self.commits.append(state, "checksum")
        LedgerFile(self.folder.ledger).append(lines)
        self.state = state
        if save:
            self.save()

    def save(self) -> None:
        backend = SimulatedBackend(self.checkpoints, {}, 3, learning_rate=self.state.step)
        backend.build()
        backend.save(self.state, None)
        self.saved = self.state.version
        CommitLog(self.folder.archive, self.name).forget(min(self.checkpoints.oldest_step(), self.followed))

    def upload(self) -> None:
        assert self.saved is not None
        if not self.writer.is_claimed:
            self.writer.claim(self.epoch)
        now = self.state
        self.writer.upload(now, self.saved)
        self.followed = now.step


def writer(bucket: Bucket, folder: RunFolder, name: str = "r") -> BucketWriter:
    return BucketWriter(bucket, folder, name, lambda: RUN_ID)


def anything(state: TrainerState) -> None:
    """A trainer that goes on from any state."""


def restore(
    bucket: Bucket,
    path: Path,
    name: str = "r",
    most: int = 2**20,
    check: Callable[[TrainerState], None] = anything,
) -> WeightVersion | None:
    one = FolderRestore(bucket, RunFolder(path), name, lambda: RUN_ID, most, 2**20, check)
    return one.run() if one.is_wanted else None


def tree(path: Path) -> dict[str, bytes]:
    """What tells of a run; its older checkpoints, and records before them, are not in the bucket."""
    found = {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    return {
        name: data for name, data in found.items() if name not in ("bucket.json", ".beginning", "published/beginning")
    }


def objects(bucket: Bucket) -> dict[str, bytes]:
    return {key: bucket.read(key, 2**24) for key in every(bucket)}


def every(bucket: Bucket) -> list[str]:
    tops = [key for top in ("checkpoints", "archive", "lines", "refused", "other") for key in bucket.keys(top)]
    try:
        bucket.read(HEAD, MAX_BYTES)
    except NotFound:
        return tops
    return [HEAD, *tops]


def head(bucket: Bucket) -> BucketHead:
    return BucketHead.from_json(bucket.read(HEAD, MAX_BYTES))


class Killed(BaseException):
    """In place of a kill."""


def put_back(bucket: Bucket, at_first: dict[str, bytes]) -> None:
    bucket.remove(every(bucket))
    for key, data in at_first.items():
        bucket.upload(key, data)


def fill(run: Run, n: int) -> None:
    """Steps that no bucket has yet."""
    for step in range(1, n + 1):
        run.step(save=step % 50 == 0)


class FailingBucket(Bucket):
    """Does not take every n-th object."""

    def __init__(self, address: str, n: int, error: BaseException) -> None:
        super().__init__(address)
        self.n, self.error, self.keys_put = n, error, list[str]()

    def upload(self, key: str, source: Any) -> None:
        self.keys_put.append(key)
        if len(self.keys_put) % self.n == 0:
            raise self.error
        super().upload(key, source)
