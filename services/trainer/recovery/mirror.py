"""Checkpoints in a bucket as well, for a trainer whose folder is lost: each one that is made is kept there, with the
log that it was made after, while training goes on; a trainer that finds no checkpoint in its folder begins with the
newest one that is whole there.

    epochs/e000002                          claimed by one trainer, before it uploads anything
    archive/e000002/s000042.zst, .json      the log, as in the run's folder
    logs/e000002-s000042/ledger.jsonl, …    the files of lines, as they were when the checkpoint was uploaded
    checkpoints/base/DIGEST/…               what adapters are of
    checkpoints/e000002-s000042/…           as in the run's folder, manifest.json last

Invariants: a checkpoint is there if and only if its manifest is, which is put last, and put only where none is: the
bucket decides, in place of a rename. Objects of a version are put by the one trainer that has claimed its epoch, and
none after a later epoch was claimed. Of what is removed the manifest goes first. What was made after the newest
checkpoint there is lost with the folder: training goes on from there, under a new epoch.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from services.trainer.status import TrainerStatus
from shared.errors import Conflict, Fenced, Forbidden, NotFound, Unavailable, WeightsError
from shared.files.buckets import Bucket
from shared.files.storage import fsync, storage
from shared.process import telemetry
from shared.process.wedge import Wait
from shared.run import state as states
from shared.run import weights
from shared.run.folder import RunFolder
from shared.run.state import STATE
from shared.run.weights import BASE, MANIFEST, ManifestFile
from shared.types import WeightVersion

CHECKPOINTS = "checkpoints"
RETRY_S = 5.0
_DRAFT = ".tmp-bucket"  # of the folder of checkpoints; removed like other drafts
_EPOCH_STEP = re.compile(r"/e(\d{6,})/s(\d{6,})")
_log = telemetry.Log("bucket")


class CheckpointMirror:
    """Of one run. What is no coroutine blocks, and raises as `Bucket`."""

    def __init__(self, bucket: Bucket, folder: RunFolder) -> None:
        self._bucket, self._folder, self._root = bucket, folder, folder.checkpoints
        self._lasting: set[str] = set()  # what is in the bucket, and never changes
        self._wanted: WeightVersion | None = None
        self._kept: WeightVersion | None = None
        self._changed, self._closing, self._ended = asyncio.Event(), False, False

    def claim(self, epoch: int) -> bool:
        """False if another trainer has the epoch."""
        try:
            self._bucket.upload(f"epochs/e{epoch:06d}", b"", new=True)
        except Conflict:
            return False
        manifests = (key for key in self._bucket.keys(CHECKPOINTS) if key.endswith(MANIFEST))
        self._lasting = {*self._bucket.keys("archive"), *self._bucket.keys("refused"), *manifests}
        return True

    def last_epoch(self) -> int:
        """The highest that was ever claimed; 0 if none was."""
        return max((int(key.rpartition("/e")[2]) for key in self._bucket.keys("epochs")), default=0)

    def wanted(self, version: WeightVersion) -> None:
        """The newest checkpoint there is; older ones that were not begun are passed over."""
        self._wanted = version
        self._changed.set()

    @asynccontextmanager
    async def running(self, status: TrainerStatus) -> AsyncIterator[None]:
        """Inside, what is `wanted` is kept; what is then on its way still gets there, or is given up at a stop without
        an answer of the bucket.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work(status))
            yield
            self._closing = True
            self._changed.set()

    async def _work(self, status: TrainerStatus) -> None:
        try:
            while not self._closing or self._wanted != self._kept:
                self._changed.clear()
                if (version := self._wanted) is None or version == self._kept:
                    await self._changed.wait()
                elif not await self._try(version, status):
                    return
        finally:
            self._ended = True

    async def _try(self, version: WeightVersion, status: TrainerStatus) -> bool:
        """False if there is no time to try it again."""
        try:
            await asyncio.to_thread(self.keep, version)
        except WeightsError as error:
            _log.warning("checkpoint passed over", version=str(version), reason=str(error))
        except (Unavailable, Forbidden, NotFound, OSError) as error:
            _log.warning("checkpoint not kept", version=str(version), reason=str(error))
            if self._closing:
                return False
            status.waits[self] = Wait("disk", f"checkpoint {version} in the bucket: {error}")
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._changed.wait()
            return True
        status.waits.pop(self, None)
        self._kept = version
        return True

    def keep(self, version: WeightVersion) -> None:
        """The checkpoint and its log are in the bucket; those that are not retained any more are not.

        Raises WeightsError if it is damaged, or was removed, and Fenced if a later epoch was claimed.
        """
        try:
            self._keep_log(version)
            state = states.read(self._root / str(version))[0]
            for name in dict.fromkeys((state.reference, str(version))):
                if name is not None:
                    self._keep_files(name, version.epoch)
        except FileNotFoundError as error:
            raise WeightsError(f"{version} was removed", "a newer one comes") from error
        self._retain(version)

    def _keep_files(self, name: str, epoch: int) -> None:
        """Of one checkpoint, once."""
        folder = self._root / name
        if (key := self._key(folder / MANIFEST)) in self._lasting:
            return
        manifest = (folder / MANIFEST).read_bytes()
        for path in _files(folder):
            if path.name != MANIFEST:
                self._put(path)
        if self.last_epoch() > epoch:
            raise Fenced("another trainer of the run has begun")
        self._put_new(key, manifest)
        self._lasting.add(key)
        _log.info("checkpoint kept", version=name, bucket=self._bucket.address)

    def _keep_log(self, version: WeightVersion) -> None:
        """Groups before their records, and what adapters are of; each of these once."""
        run, adapter = self._folder, weights.read_manifest(self._root / str(version)).adapter
        base = _files(adapter.base.folder(self._root)) if adapter else []
        groups, records = (sorted(run.archive.glob(f"e*/s*.{kind}")) for kind in ("zst", "json"))
        for path in (*groups, *records, *_files(run.refused_groups), *base):
            if (key := self._key(path)) not in self._lasting:
                with suppress(FileNotFoundError):  # a record of a step before the checkpoints that are retained
                    self._put(path)
                    self._lasting.add(key)
        for path in _lines(run):
            if path.exists():
                self._put(path, f"logs/{version}/{path.name}")

    def _key(self, path: Path) -> str:
        return path.relative_to(self._folder.path).as_posix()

    def _put(self, path: Path, key: str | None = None) -> None:
        if self._ended:
            raise Unavailable("the trainer has ended")
        self._bucket.upload(key or self._key(path), path)

    def _put_new(self, key: str, data: bytes) -> None:
        try:
            self._bucket.upload(key, data, new=True)
        except Conflict:
            if self._bucket.read(key, weights.MAX_MANIFEST_BYTES) != data:  # else it is ours, whose answer was lost
                raise Fenced(f"{key} is there already, and another one") from None

    def _retain(self, version: WeightVersion) -> None:
        """What a trainer that was killed left of older ones goes as well."""
        kept = {str(version), *map(str, weights.versions(self._root))}
        keys = [*self._bucket.keys(CHECKPOINTS), *self._bucket.keys("logs")]
        gone = [key for key in keys if _is_before(key.split("/")[1], version) and key.split("/")[1] not in kept]
        self._bucket.remove(sorted(gone, key=lambda key: not key.endswith(MANIFEST)))

    def restore(self) -> WeightVersion | None:
        """Fills a folder without checkpoints from the newest one of the bucket that is whole; None where there is
        nothing to do. May be repeated. Raises WeightsError if none of those in the bucket is whole, StorageFull.
        """
        draft = self._root / _DRAFT  # is there as long as this is not done
        if weights.versions(self._root) and not draft.exists():
            return None
        names = [key.split("/")[1] for key in self._bucket.keys(CHECKPOINTS) if key.endswith(f"/{MANIFEST}")]
        found = states.surviving(sorted(filter(None, map(WeightVersion.of_name, names))))
        for version in reversed(found):
            try:
                self._restore(version)
            except (WeightsError, NotFound, Forbidden) as error:
                _log.error("checkpoint passed over", version=str(version), reason=str(error))
                continue
            shutil.rmtree(draft)
            _log.warning("begun from the bucket: what was made after this checkpoint is lost", version=str(version))
            return version
        if found:
            raise WeightsError(
                f"none of the {len(found)} checkpoints in {self._bucket.address} is whole",
                "restore one, or start a run with another name and bucket",
            )
        return None

    def _restore(self, version: WeightVersion) -> None:
        """With the log before it, and the checkpoint of its reference: these get their names last."""
        with storage(self._folder.path):
            drafts = [self._fetch(str(version))]
            reference = states.read(drafts[0])[0].reference
            if reference is not None and reference != str(version):
                drafts.append(self._fetch(reference))
            self._fetch_log(version)
            for draft in reversed(drafts):
                shutil.rmtree(self._root / draft.name, ignore_errors=True)  # of a start that was killed here
                draft.rename(self._root / draft.name)
            fsync(self._root)

    def _fetch(self, name: str) -> Path:
        """A draft of a checkpoint, which is whole, and what it is adapters of."""
        draft, source = self._root / _DRAFT / name, f"{CHECKPOINTS}/{name}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for part, most in ((MANIFEST, weights.MAX_MANIFEST_BYTES), (STATE, states.MAX_STATE_BYTES)):
            (draft / part).write_bytes(self._bucket.read(f"{source}/{part}", most))
            fsync(draft / part)
        manifest, (_, optimizer) = weights.read_manifest(draft), states.read(draft)
        self._download(source, draft, (*manifest.files, *optimizer))
        states.verify(draft)
        if manifest.adapter is not None:
            base = manifest.adapter.base
            self._download(f"{CHECKPOINTS}/{BASE}/{base.digest}", base.folder(self._root), base.files)
            weights.verify_base(self._root, base)
        return draft

    def _fetch_log(self, version: WeightVersion) -> None:
        """Up to the checkpoint: of later steps the files of lines do not tell all."""
        lines = {path.name: path for path in _lines(self._folder)}
        for key in (*self._bucket.keys("archive"), *self._bucket.keys("refused")):
            made = _EPOCH_STEP.search(f"/{key}")
            if made is not None and WeightVersion(int(made[1]), int(made[2])) <= version:
                self._fetch_file(key, weights.confined(self._folder.path, key))
        for key in self._bucket.keys(f"logs/{version}"):
            if (path := lines.get(key.rpartition("/")[2])) is not None:
                self._fetch_file(key, path)

    def _download(self, source: str, folder: Path, files: Iterable[ManifestFile]) -> None:
        for file in files:
            self._fetch_file(f"{source}/{file.name}", weights.confined(folder, file.name), file.size)

    def _fetch_file(self, key: str, path: Path, size: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._bucket.download(key, path, size)
        fsync(path)
        fsync(path.parent)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _lines(folder: RunFolder) -> tuple[Path, ...]:
    """The files of lines that a trainer's folder has."""
    own = folder.ledger, folder.metrics, folder.handovers, folder.refused, folder.sft
    return (*own, *folder.handed_over.values())


def _is_before(name: str, version: WeightVersion) -> bool:
    found = WeightVersion.of_name(name)
    return found is not None and found < version
