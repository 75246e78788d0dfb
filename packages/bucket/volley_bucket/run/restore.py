"""Restore of an empty run folder from the run's bucket.

Invariants: nothing is restored into a folder that holds files of a run, so newer content is never replaced by older.
Order: download and verify all that the head names, then transfer the head to this folder, then rename the files into
place. A start that is killed meanwhile repeats this. After the transfer the bucket's previous folder can no longer
write a head, and the epochs that follow are higher than any of its epochs.
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

from shared.errors import ConfigError, Conflict, NotFound, Unavailable, WeightsError
from shared.files.locks import existing_lock_file
from shared.files.reading import confined
from shared.files.storage import append, fsync, storage
from shared.process import telemetry
from shared.run import archive, checkpoint_files, commits
from shared.run import state as states
from shared.run.checkpoint_files import BASE, MANIFEST, Manifest, ManifestFile
from shared.run.folder import RUN_ID, RunFolder
from shared.run.lineage import epoch_of, in_lineage
from shared.run.state import STATE, TrainerState
from shared.types import WeightVersion
from volley_bucket.objects import Bucket, Tag, check_names
from volley_bucket.run.head import (
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
from volley_bucket.run.identity import FolderIdentity

_DRAFT, _DONE = ".from-bucket", ".restored"
_N_AT_ONCE, _BATCH = 8, 256
_UNSEEN = 1000
"""Epochs that may have begun after the head was written, without a trace."""
_log = telemetry.Log("bucket")


class FolderRestore:
    """Restores an empty folder. Every method blocks, and raises as `Bucket`, and StorageFull.

    Args:
        run_id: returns the run's identifier, drawn if there is none.
        max_checkpoint_bytes, max_step_bytes: largest sizes of a checkpoint and of a step's groups.
        check: raises ConfigError if this trainer cannot resume from a state.
    """

    def __init__(
        self,
        bucket: Bucket,
        folder: RunFolder,
        run: str,
        run_id: Callable[[], str],
        max_checkpoint_bytes: int,
        max_step_bytes: int,
        check: Callable[[TrainerState], object],
    ) -> None:
        self._bucket, self._folder, self._run, self._run_id = bucket, folder, run, run_id
        self._max_checkpoint_bytes, self._max_step_bytes = max_checkpoint_bytes, max_step_bytes
        self._check = check
        self._draft, self._done = RunFolder(folder.path / _DRAFT), RunFolder(folder.path / _DONE)

    @property
    def is_wanted(self) -> bool:
        """True if the folder is empty, or its restore was interrupted."""
        return self._done.path.exists() or _is_empty(self._folder)

    def run(self) -> WeightVersion | None:
        """Restore the folder from the bucket; return the restored version, None if the bucket has no step.

        A new run becomes the bucket's owner. May be repeated.

        Raises ConfigError if the bucket is another run's, has continued from another folder since the download, is
        being filled by another folder, or has a state that this trainer cannot resume from; WeightsError if its
        contents are invalid.
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
                if not self._is_there(tag):  # a newer head may have removed the objects
                    raise self._overtaken() from error
                raise
            return self._place()
        if found is not None and identity is not None and identity.folder == found.folder:
            return None
        if found is not None:
            self._check_never_filled()
            _log.warning(
                "the bucket has no step to resume from, the run starts from step 0", bucket=self._bucket.address
            )
        identity = FolderIdentity.draw().owning(self._bucket.address)
        with storage(self._folder.path):
            self._folder.path.mkdir(parents=True, exist_ok=True)
            identity.write(self._folder.bucket)
        self._claim(BucketHead(self._run, identity.folder, self._run_id(), 0, ()), tag)
        return None

    def _check_never_filled(self) -> None:
        """Raise ConfigError if the head names no step, but the bucket has part of a run's log."""
        if self._bucket.keys("archive"):
            raise ConfigError(
                f"{self._bucket.address} is being filled by another folder of run {self._run}, and has no step yet",
                "start the trainer with that folder; if it is lost, empty the bucket or choose another run.bucket",
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
            f"{self._bucket.address} changed while it was read",
            "stop the trainer of the bucket's previous folder if it still runs; this start waits for that",
        )

    def _fetch(self, head: BucketHead, tag: Tag | None) -> None:
        """Download everything into a draft folder, then transfer the head to this folder."""
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
            for path in (draft.published / RUN_ID, draft.run_id):
                path.write_text(head.beginning, encoding="utf-8")
            identity.write(draft.bucket)
            for path in (draft.path, *draft.path.rglob("*")):
                fsync(path)
            self._claim(head, tag)
            draft.path.rename(self._done.path)
            fsync(self._folder.path)

    def _fetch_checkpoint(self, head: BucketHead) -> None:
        """Download the newest valid checkpoint, its reference, and the commit records after it."""
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
                _log.error("checkpoint skipped", version=name, reason=str(error))
                shutil.rmtree(self._draft.checkpoints)
                self._draft.checkpoints.mkdir()
            else:
                return
        raise WeightsError(
            f"none of the {len(digests)} checkpoints in {self._bucket.address} is valid",
            "start a run with another name and bucket",
        )

    def _fetch_version(self, name: str, digests: dict[str, str]) -> TrainerState:
        """Download a checkpoint; return its state. Raises WeightsError if it is damaged, too large or another one."""
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
            raise WeightsError(
                f"{source} has {n} bytes, but a checkpoint of this model has at most {self._max_checkpoint_bytes}"
            )
        for file in files:
            path = confined(folder, file.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._bucket.download(f"{source}/{file.name}", path, file.size)

    def _fetch_records(self, head: BucketHead, state: TrainerState) -> None:
        """Download the records of steps after the checkpoint, and of later epochs' starts. Raises NotFound."""
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
        """Download files of at most `most` bytes, which have the same paths in the bucket."""

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
        """Rename the downloaded files into place; append lines that an orchestrator recorded here meanwhile."""
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
                if target == self._folder.published:  # left by a start that made no step
                    shutil.rmtree(target, ignore_errors=True)
                source.rename(target)
            fsync(self._folder.path)
            for one in before:
                one.add_to(one.path)
            self._done.path.rmdir()
        if identity is None or identity.restored is None:
            return None
        _log.warning("restored the empty run folder from its bucket", version=identity.restored)
        return WeightVersion.parse(identity.restored)


@dataclass(slots=True)
class _Recorded:
    """A file of lines that is being replaced while an orchestrator may still append to it."""

    path: Path
    file: IO[bytes]
    n_read: int = 0

    def add_to(self, path: Path) -> None:
        """Append to `path` the lines since the last call that it does not have."""
        self.file.seek(self.n_read)
        data = self.file.read()
        data = data[: data.rfind(b"\n") + 1]
        self.n_read += len(data)
        known = set(path.read_bytes().split(b"\n"))
        new = [line + b"\n" for line in data.split(b"\n") if line not in known]
        if new:
            append(path, b"".join(new), durable=True)


def _steps(head: BucketHead, first: int) -> Iterable[WeightVersion]:
    """Yield the versions of the lineage, from step `first` on."""
    assert head.version is not None
    for step in range(first, head.version.step + 1):
        yield WeightVersion(epoch_of(step, head.lineage) or 0, step)


def _is_empty(folder: RunFolder) -> bool:
    """True if the folder has no files of a trainer, except drafts."""
    own = folder.ledger, folder.metrics, folder.handovers, folder.refused, folder.sft
    held = (*own, folder.archive, folder.refused_groups)
    return not any(path.exists() for path in held) and not any(folder.checkpoints.glob("*"))
