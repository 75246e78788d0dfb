"""A run's folder that is empty, filled from the run's bucket.

Invariants: nothing is written into a folder that holds anything of a run's own, so what it has is never replaced by
something older; all that a head names is here, and whole, before the head is this folder's, and the head is this
folder's before anything has its name. A start that is killed meanwhile begins with that again. From then on the folder
that the bucket followed before cannot put a head any more, and the epochs that follow are higher than any of its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path
from typing import IO

import blake3

from services.trainer.bucket.head import (
    HEAD,
    MAX_BYTES,
    MOST_EPOCHS,
    BucketHead,
    Piece,
    files_of_lines,
    find_head,
    other_folder,
    put_head,
)
from services.trainer.bucket.identity import FolderIdentity
from shared.errors import ConfigError, Conflict, NotFound, Unavailable, WeightsError
from shared.files.buckets import Bucket, Tag, check_names
from shared.files.locks import existing_lock_file
from shared.files.reading import confined
from shared.files.storage import append, fsync, storage
from shared.process import telemetry
from shared.run import archive, checkpoint_files, commits
from shared.run import state as states
from shared.run.checkpoint_files import BASE, MANIFEST, Manifest, ManifestFile
from shared.run.folder import BEGINNING, RunFolder
from shared.run.state import STATE, TrainerState, epoch_of, in_lineage
from shared.types import WeightVersion

_DRAFT, _DONE = ".from-bucket", ".restored"
_N_AT_ONCE, _BATCH = 8, 256
_UNSEEN = 1000
"""So many epochs may have begun since the head was put, of which nothing is left to tell."""
_log = telemetry.Log("bucket")


class FolderRestore:
    """Every method blocks, and raises as `Bucket`, and StorageFull.

    Args:
        beginning: names the beginning of the run, and draws it where there is none.
        max_checkpoint_bytes, max_step_bytes: what a checkpoint, and the groups of a step, can have at most.
        check: raises ConfigError if this trainer cannot go on from a state.
    """

    def __init__(
        self,
        bucket: Bucket,
        folder: RunFolder,
        run: str,
        beginning: Callable[[], str],
        max_checkpoint_bytes: int,
        max_step_bytes: int,
        check: Callable[[TrainerState], object],
    ) -> None:
        self._bucket, self._folder, self._run, self._beginning = bucket, folder, run, beginning
        self._max_checkpoint_bytes, self._max_step_bytes = max_checkpoint_bytes, max_step_bytes
        self._check = check
        self._draft, self._done = RunFolder(folder.path / _DRAFT), RunFolder(folder.path / _DONE)

    @property
    def is_wanted(self) -> bool:
        """Whether the folder is empty, or was when it was last filled."""
        return self._done.path.exists() or _is_empty(self._folder)

    def run(self) -> WeightVersion | None:
        """Fills a folder that is empty, if the bucket has something of the run: with which version. A run that is new
        becomes the bucket's owner. May be repeated.

        Raises ConfigError if the bucket is another run's, or has gone on from another folder since it was fetched, or
        is being filled by one, or if this trainer cannot go on from what it has, and WeightsError if nobody can.
        """
        identity = FolderIdentity.read(self._done.bucket) or FolderIdentity.read(self._folder.bucket)
        is_fetched = self._done.path.exists()
        found, tag = find_head(self._bucket, self._run, identity if is_fetched else None)
        if is_fetched:
            if found is not None and (identity is None or found.folder != identity.folder):
                raise other_folder(self._bucket, found)
            return self._place()
        if found is not None and found.version is not None:
            try:
                self._fetch(found, tag)
            except (WeightsError, NotFound) as error:
                if not self._is_there(tag):  # what it named may be gone since
                    raise self._overtaken() from error
                raise
            return self._place()
        if found is not None and identity is not None and identity.folder == found.folder:
            return None
        if found is not None:
            self._check_never_filled()
            _log.warning("the bucket has nothing to go on from: the run begins anew", bucket=self._bucket.address)
        identity = FolderIdentity.draw().owning(self._bucket.address)
        with storage(self._folder.path):
            self._folder.path.mkdir(parents=True, exist_ok=True)
            identity.write(self._folder.bucket)
        self._claim(BucketHead(self._run, identity.folder, self._beginning(), 0, ()), tag)
        return None

    def _check_never_filled(self) -> None:
        """Raises ConfigError if a bucket that has no step to go on from has some of a run's log."""
        if self._bucket.keys("archive"):
            raise ConfigError(
                f"{self._bucket.address} is being filled by another folder of run {self._run}, and has no step yet",
                "start the trainer with that folder; if it is lost, begin anew: empty the bucket, or choose another",
            )

    def _claim(self, head: BucketHead, tag: Tag | None) -> None:
        try:
            put_head(self._bucket, head, tag)
        except Conflict as error:
            raise self._overtaken() from error

    def _is_there(self, tag: Tag | None) -> bool:
        with suppress(NotFound, WeightsError):
            return self._bucket.read_tagged(HEAD, MAX_BYTES)[1] == tag
        return False

    def _overtaken(self) -> Unavailable:
        return Unavailable(
            f"{self._bucket.address} has changed while it was read",
            "if the trainer of the folder before is still at work, stop it: the start waits for that",
        )

    def _fetch(self, head: BucketHead, tag: Tag | None) -> None:
        """All of it, as a folder beside; then the head is ours."""
        assert head.version is not None
        draft, identity = self._draft, FolderIdentity.draw(str(head.version)).owning(self._bucket.address)
        last = max(head.epoch, *head.epochs) + _UNSEEN
        if last > MOST_EPOCHS:
            raise WeightsError(f"{HEAD} names epoch {last - _UNSEEN}, which leaves none for another trainer")
        head = replace(head, folder=identity.folder, epochs=(*head.epochs, last))
        with storage(self._folder.path):
            shutil.rmtree(draft.path, ignore_errors=True)
            draft.checkpoints.mkdir(parents=True)
            for epoch in head.epochs:
                (draft.archive / f"e{epoch:06d}").mkdir(parents=True)
            self._fetch_checkpoint(head)
            steps = _steps(head, 1)
            self._fetch_all((archive.path_of(draft.archive, version) for version in steps), self._max_step_bytes)
            refused = ((WeightVersion.parse(name), n) for name, most in head.refused for n in range(1, most + 1))
            paths = (archive.refused_path(draft.refused_groups, version, n) for version, n in refused)
            self._fetch_all(paths, self._max_step_bytes)
            for name, path in files_of_lines(draft).items():
                self._fetch_lines(path, head.lines.get(name, ()))
            draft.published.mkdir()
            for path in (draft.published / BEGINNING, draft.beginning):
                path.write_text(head.beginning, encoding="utf-8")
            identity.write(draft.bucket)
            for path in (draft.path, *draft.path.rglob("*")):
                fsync(path)
            self._claim(head, tag)
            draft.path.rename(self._done.path)
            fsync(self._folder.path)

    def _fetch_checkpoint(self, head: BucketHead) -> None:
        """The newest one that is whole, its reference, and the records after it."""
        digests = dict(head.checkpoints)
        for name in reversed(digests):
            try:
                state = self._fetch_version(name, digests)
                if state.reference not in (None, name):
                    self._fetch_version(str(state.reference), digests)
                if not in_lineage(state.version, head.lineage):
                    raise WeightsError(f"{name} is not of the lineage of {HEAD}")
                self._fetch_records(head, state)
                self._check(commits.newest(self._draft) or state)
            except (WeightsError, NotFound) as error:
                _log.error("checkpoint passed over", version=name, reason=str(error))
                shutil.rmtree(self._draft.checkpoints)
                self._draft.checkpoints.mkdir()
            else:
                return
        raise WeightsError(
            f"none of the {len(digests)} checkpoints in {self._bucket.address} is whole",
            "start a run with another name and bucket",
        )

    def _fetch_version(self, name: str, digests: dict[str, str]) -> TrainerState:
        """Its state. Raises WeightsError if it is not whole, another than the head names, or larger than it can be."""
        folder, source = self._draft.checkpoints / name, f"checkpoints/{name}"
        data = self._bucket.read(f"{source}/{MANIFEST}", checkpoint_files.MAX_MANIFEST_BYTES)
        if blake3.blake3(data).hexdigest() != digests.get(name):
            raise WeightsError(f"the manifest of {name} is not the one that the head names")
        manifest = Manifest.from_json(data)
        if (manifest.run, manifest.version) != (self._run, name):
            raise WeightsError(f"{name} is {manifest.version[:50]} of run {manifest.run[:100]}")
        folder.mkdir(exist_ok=True)
        (folder / MANIFEST).write_bytes(data)
        (folder / STATE).write_bytes(self._bucket.read(f"{source}/{STATE}", states.MAX_STATE_BYTES))
        state, optimizer = states.read(folder)
        self._download(source, folder, (*manifest.files, *optimizer))
        states.verify(folder)
        if str(state.version) != name:
            raise WeightsError(f"{name} holds the state of {state.version}")
        if (
            manifest.adapter is not None
            and not (base := manifest.adapter.base).folder(self._draft.checkpoints).exists()
        ):
            source = f"checkpoints/{BASE}/{base.digest}"
            self._download(source, base.folder(self._draft.checkpoints), base.files)
            checkpoint_files.verify_base(self._draft.checkpoints, base)
        return state

    def _download(self, source: str, folder: Path, files: Iterable[ManifestFile]) -> None:
        files = tuple(files)
        check_names((file.name for file in (*files, ManifestFile(STATE, 0, ""))), MANIFEST)
        if (n := sum(file.size for file in files)) > self._max_checkpoint_bytes:
            raise WeightsError(f"{source} has {n} bytes, one of this model {self._max_checkpoint_bytes} at most")
        for file in files:
            path = confined(folder, file.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._bucket.download(f"{source}/{file.name}", path, file.size)

    def _fetch_records(self, head: BucketHead, state: TrainerState) -> None:
        """Those of all steps after the checkpoint, and of where epochs began since then. Raises NotFound."""
        root = self._draft.archive
        self._fetch_all((commits.path_of(root, v) for v in _steps(head, state.step + 1)), states.MAX_STATE_BYTES)
        for epoch, began in head.lineage:
            version = WeightVersion(epoch, began)
            if began >= state.step and version != state.version:
                needed = version == head.version
                self._fetch_record(commits.path_of(root, version), needed=needed)

    def _fetch_record(self, path: Path, *, needed: bool) -> None:
        try:
            self._fetch_all([path], states.MAX_STATE_BYTES)
        except NotFound:
            path.unlink(missing_ok=True)
            if needed:
                raise

    def _fetch_all(self, paths: Iterable[Path], most: int) -> None:
        """Files that lie in the bucket as they do here, of so many bytes at most."""

        def fetch(path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._bucket.download(path.relative_to(self._draft.path).as_posix(), path, most, at_most=True)

        with ThreadPoolExecutor(_N_AT_ONCE) as threads:
            for some in batched(paths, _BATCH):
                for _ in threads.map(fetch, some):
                    pass

    def _fetch_lines(self, path: Path, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            data = self._bucket.read(piece.key, piece.size)
            if blake3.blake3(data).hexdigest() != piece.blake3:
                raise WeightsError(f"{self._bucket.address}/{piece.key} is damaged")
            with path.open("ab") as file:
                file.write(data)

    def _place(self) -> WeightVersion | None:
        """Gives what was fetched its names; what an orchestrator has recorded here meanwhile comes after it."""
        identity = FolderIdentity.read(self._done.bucket) or FolderIdentity.read(self._folder.bucket)
        records = {path.name for path in self._folder.handed_over.values()}
        with storage(self._folder.path), ExitStack() as held:
            if (lock := existing_lock_file(self._folder.mixture.with_suffix(".lock"))) is not None:
                held.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
            before = list[_Recorded]()
            for source in sorted(self._done.path.iterdir(), key=lambda path: path == self._done.bucket):
                target = self._folder.path / source.name
                if source.name in records and target.exists():
                    before.append(_Recorded(target, held.enter_context(target.open("rb"))))
                    before[-1].add_to(source)
                if target == self._folder.published:  # of a beginning that never was
                    shutil.rmtree(target, ignore_errors=True)
                source.rename(target)
            fsync(self._folder.path)
            for one in before:
                one.add_to(one.path)
            self._done.path.rmdir()
        if identity is None or identity.restored is None:
            return None
        _log.warning("the folder was empty and is filled from the bucket", version=identity.restored)
        return WeightVersion.parse(identity.restored)


@dataclass(slots=True)
class _Recorded:
    """A file of lines that another one is put in the place of: an orchestrator may have it open, and add to it."""

    path: Path
    file: IO[bytes]
    n_read: int = 0

    def add_to(self, path: Path) -> None:
        """Its lines since the last call, those left out that are there."""
        self.file.seek(self.n_read)
        data = self.file.read()
        data = data[: data.rfind(b"\n") + 1]
        self.n_read += len(data)
        known = set(path.read_bytes().split(b"\n"))
        new = [line + b"\n" for line in data.split(b"\n") if line not in known]
        if new:
            append(path, b"".join(new), durable=True)


def _steps(head: BucketHead, first: int) -> Iterable[WeightVersion]:
    """Of the lineage, from step `first` on."""
    assert head.version is not None
    for step in range(first, head.version.step + 1):
        yield WeightVersion(epoch_of(step, head.lineage) or 0, step)


def _is_empty(folder: RunFolder) -> bool:
    """Of what a trainer writes but its first drafts, which tell of nothing that was made."""
    own = folder.ledger, folder.metrics, folder.handovers, folder.refused, folder.sft
    held = (*own, folder.archive, folder.refused_groups)
    return not any(path.exists() for path in held) and not any(folder.checkpoints.glob("*"))
