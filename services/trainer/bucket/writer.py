"""A run's bucket as one incarnation of the trainer writes it: the folder is the truth, the bucket follows.

Invariants: of the log only steps with a durable commit record are put, never the one under way; what a head names is
put before it; an incarnation puts under names of its own epoch, or what the folder has had before, so one that was
replaced overwrites nothing of its successor, whose claim of the head it cannot pass. Only what a later head does not
name is removed. A head that was lost, or names what was, is followed by a whole one only, and until then nothing is
removed: nobody is told meanwhile that there is nothing to go on from.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import blake3
import orjson

from services.trainer.bucket.head import HEAD, MAX_BYTES, BucketHead, Piece, find_head, other_folder, put_head
from services.trainer.bucket.identity import FolderIdentity
from services.trainer.bucket.lines import FollowedLines
from shared.errors import ConfigError, Conflict, DecodeError, Fenced, Unavailable, WeightsError
from shared.files import storage
from shared.files.buckets import Bucket, Tag
from shared.process import telemetry
from shared.run import archive, checkpoint_files, commits
from shared.run import state as states
from shared.run.checkpoint_files import BASE, MANIFEST, BaseWeights
from shared.run.folder import RunFolder
from shared.run.state import STATE, TrainerState, epoch_of, in_lineage
from shared.types import WeightVersion

_TRIES, _KEPT = 8, ".to-bucket"
_MANY = 32
"""So many files are looked up in the bucket before they are put."""
_STEP = re.compile(r"(?:archive|refused)/e(\d{6,18})/s(\d{6,18})(?:-(\d{1,9}))?\.(?:zst|json)\Z")
_log = telemetry.Log("bucket")


class BucketWriter:
    """Every method blocks, and raises as `Bucket`.

    Args:
        beginning: names the beginning of the run.
    """

    def __init__(self, bucket: Bucket, folder: RunFolder, run: str, beginning: Callable[[], str]) -> None:
        self._bucket, self._folder, self._run, self._beginning = bucket, folder, run, beginning
        self._identity: FolderIdentity | None = None
        self._head: BucketHead | None = None  # as this incarnation has put it; one of no step where it was lost
        self._tag: Tag | None = None
        self._lines, self._made = FollowedLines(folder, self._put_piece), set[str]()
        self._is_swept = self._is_closed = False

    @property
    def is_claimed(self) -> bool:
        return self._head is not None

    @property
    def step(self) -> int | None:
        """The newest one that the bucket has, as far as this incarnation has put it."""
        return None if self._head is None or self._head.version is None else self._head.version.step

    def close(self) -> None:
        """What is under way ends with Unavailable before the next object."""
        self._is_closed = True

    def check(self) -> bool:
        """Whether the bucket is this folder's, or a new one; not where its head was lost, which would tell.

        Raises ConfigError if it is another run's, or has gone on from another folder, or this one has lost a part.
        """
        self._lines.look()
        shutil.rmtree(self._folder.path / _KEPT, ignore_errors=True)
        identity = FolderIdentity.read(self._folder.bucket)
        found, _ = find_head(self._bucket, self._run, identity)
        if found is not None:
            self._check_ours(found, "" if identity is None else identity.folder, found.epoch)
        return found is not None or identity is None or self._bucket.address not in identity.owns

    def check_known(self) -> None:
        """Raises as `check`, and Unavailable where that does not tell."""
        if not self.check():
            raise Unavailable(
                f"{self._bucket.address} has lost its {HEAD}, and the queue knows of a later trainer than this folder",
                "the trainer that works puts it again; if none does, choose another run.bucket",
            )

    def claim(self, epoch: int) -> None:
        """From here on no earlier trainer puts a head; where it was lost, or what it names, from the next one on that
        this one puts.

        Raises ConfigError as `check`, Fenced if a later epoch was claimed.
        """
        identity = FolderIdentity.read(self._folder.bucket) or FolderIdentity.draw()
        for _ in range(_TRIES):
            found, tag = find_head(self._bucket, self._run, identity)
            seen = tuple(sorted(archive.epochs(self._folder.archive)))
            bare = BucketHead(self._run, identity.folder, self._beginning(), epoch, seen)
            is_owned = found is None and self._bucket.address in identity.owns
            is_lost = is_owned and (tag is not None or not self._bucket.is_empty())
            found = found or bare
            self._check_ours(found, identity.folder, epoch)
            self._lines.begin(found.lines, self._bucket.address)
            self._identity = identity.owning(self._bucket.address)
            self._identity.write(self._folder.bucket)
            if is_lost or self._has_lost(found):
                self._begin_anew(bare, tag)
                return
            head = replace(found, epoch=epoch, epochs=seen, beginning=bare.beginning)
            try:
                self._tag = put_head(self._bucket, head, tag)
            except Conflict:
                continue
            self._head = head
            return
        raise _restless(self._bucket)

    def _has_lost(self, head: BucketHead) -> bool:
        """Whether the bucket lacks groups, lines, or files of checkpoints that the head names."""
        if head.version is None:
            return False
        tops = "archive", "checkpoints", "lines", "refused"
        there = {key for top in tops for key in self._bucket.keys(top)}
        steps = (WeightVersion(epoch_of(n, head.lineage) or 0, n) for n in range(1, head.version.step + 1))
        named = {archive.path_of(Path("archive"), version).as_posix() for version in steps}
        refused = ((WeightVersion.parse(name), n) for name, most in head.refused for n in range(1, most + 1))
        named |= {archive.refused_path(Path("refused"), *one).as_posix() for one in refused}
        named |= {name for name in head.names() if name.startswith("lines/")}
        for name, _ in head.checkpoints:
            below = f"checkpoints/{name}"
            with suppress(WeightsError, OSError):  # one that is not there any more, but for its name
                named |= {f"{below}/{file}" for file in _files_of(self._folder.checkpoints / name)}
            named.add(f"{below}/{MANIFEST}")
        if lost := named - there:
            _log.warning("the bucket has lost what its head names", n=len(lost), one=min(lost))
        return bool(lost)

    def _begin_anew(self, bare: BucketHead, tag: Tag | None) -> None:
        """All is put again, and then a head, in the place of the one that `tag` is of; what is there already stays."""
        self._head, self._tag = bare, tag
        self._lines.forget()

    def _check_ours(self, found: BucketHead, folder: str, epoch: int) -> None:
        if found.folder != folder:
            raise other_folder(self._bucket, found)
        if found.epoch > epoch:
            raise Fenced("another trainer of the run has begun")
        if found.version is not None and (step := found.version.step):
            made = WeightVersion(epoch_of(step, found.lineage) or 0, step)
            if not archive.path_of(self._folder.archive, made).exists():
                raise ConfigError(
                    f"{self._bucket.address} has {made}, which this folder has not: it is an older copy, or has lost a"
                    " part of its archive",
                    "to go on from the bucket, move this folder away; or choose another run.bucket",
                )
        named = {epoch for epoch in (found.epoch, *(epoch for epoch, _ in found.lineage)) if epoch}
        if unseen := named - {*archive.epochs(self._folder.archive)}:
            raise ConfigError(
                f"{self._bucket.address} has epoch {min(unseen)}, which this folder has not seen:"
                " it is an older copy, or has lost a part of its archive",
                "to go on from the bucket, move this folder away; or choose another run.bucket",
            )

    def upload(self, state: TrainerState, saved: WeightVersion) -> None:
        """The log up to `state`, which is durable, and the checkpoint `saved` that leads there. The log comes first: a
        checkpoint may take long; where one that is in the bucket leads there, too, it gets a head of its own.

        Raises Fenced if another trainer has claimed the bucket, FileNotFoundError or WeightsError if the checkpoint was
        removed or is damaged.
        """
        head = self._head
        assert head is not None
        if (
            head.lineage == state.lineage
            and str(saved) not in dict(head.checkpoints)
            and self._has_records(head, state)
        ):
            self._put_log(head, state, WeightVersion.parse(head.checkpoints[-1][0]))
            head = self._put_head(head, state, head.checkpoints)
        self._put_log(head, state, saved)
        self._put_head(head, state, self._put_checkpoints(head, state, saved))

    def _put_head(self, head: BucketHead, state: TrainerState, checkpoints: tuple[tuple[str, str], ...]) -> BucketHead:
        """After the lines that it names. That head."""
        lines = self._lines.put(state.version, head.epoch)
        refused = self._put_refused(head)
        made = replace(
            head,
            version=state.version,
            lineage=state.lineage,
            epochs=tuple(sorted(archive.epochs(self._folder.archive))),
            checkpoints=checkpoints,
            lines=lines,
            refused=refused,
        )
        self._commit(made)
        return made

    def _has_records(self, head: BucketHead, state: TrainerState) -> bool:
        """Of all steps that the bucket lacks; one that follows keeps them (see `RunBucket.needed_step`)."""
        return all(commits.path_of(self._folder.archive, version).exists() for version in _lacking(head, state))

    def _put_checkpoints(
        self, head: BucketHead, state: TrainerState, saved: WeightVersion
    ) -> tuple[tuple[str, str], ...]:
        """Of the reference, of the one before, and `saved`."""
        before = [
            (name, digest)
            for name, digest in head.checkpoints
            if in_lineage(version := WeightVersion.parse(name), state.lineage) and version < saved
        ]
        reference = [self._put_checkpoint(head, state.reference)] if state.reference not in (None, str(saved)) else []
        newest = self._put_checkpoint(head, str(saved))
        return (*reference, *[one for one in before if one not in reference][-1:], newest)

    def _put_checkpoint(self, head: BucketHead, name: str | None) -> tuple[str, str]:
        """Its name, and the digest of its manifest."""
        folder = self._folder.checkpoints / str(name)
        made = folder.name, blake3.blake3((folder / MANIFEST).read_bytes()).hexdigest()
        if made not in head.checkpoints:
            with self._kept(folder) as kept:
                self._put_files(kept)
            _log.info("checkpoint is in the bucket", version=folder.name, bucket=self._bucket.address)
        return made

    @contextmanager
    def _kept(self, folder: Path) -> Iterator[Path]:
        """A checkpoint as links: it stays, however many newer ones are made while it is put."""
        kept = self._folder.path / _KEPT
        shutil.rmtree(kept, ignore_errors=True)
        try:
            kept.mkdir()
            storage.link_tree(folder, kept / folder.name)
            yield kept / folder.name
        finally:
            shutil.rmtree(kept, ignore_errors=True)

    def _put_files(self, folder: Path) -> None:
        """A checkpoint's, the manifest last."""
        manifest = checkpoint_files.read_manifest(folder)
        below = f"checkpoints/{folder.name}"
        self._made.add(below)
        if manifest.adapter is not None:
            self._put_base(manifest.adapter.base)
        for name in _files_of(folder):
            self._upload(f"{below}/{name}", folder / name)

    def _put_base(self, base: BaseWeights) -> None:
        """What adapters are of, once: an object that is there is whole."""
        folder = base.folder(self._folder.checkpoints)
        there = set(self._bucket.keys(f"checkpoints/{BASE}/{base.digest}"))
        for file in base.files:
            if (key := self._key(folder / file.name)) not in there:
                self._upload(key, folder / file.name)

    def _put_log(self, head: BucketHead, state: TrainerState, saved: WeightVersion) -> None:
        """Groups and records of the steps that the bucket lacks. Records before the checkpoint may be gone."""
        root, paths = self._folder.archive, list[Path]()
        for version in _lacking(head, state):
            record = commits.path_of(root, version)
            paths += [archive.path_of(root, version), *([record] if version.step > saved.step else _existing(record))]
        for began in state.lineage:
            if began not in head.lineage:
                paths += _existing(commits.path_of(root, WeightVersion(*began)))
        self._put_all("archive", paths)

    def _put_all(self, top: str, paths: Sequence[Path]) -> None:
        """Files whose names never get another content: of many, those that are there are not put again, so that an end
        is reached, however often that fails or is killed.
        """
        there = self._bucket.sizes(top) if len(paths) > _MANY else {}
        for path in paths:
            key = self._key(path)
            if key not in there or there[key] != path.stat().st_size:
                self._upload(key, path)

    def _put_refused(self, head: BucketHead) -> tuple[tuple[str, int], ...]:
        """The groups of refused steps, of those lines that are in the bucket."""
        path, there = self._folder.refused, Counter(dict(head.refused))
        if not (size := self._lines.size(path)):
            return ()
        with path.open("rb") as file:
            found = Counter(filter(None, map(_refused, file.read(size).splitlines())))
        lacking = (
            (WeightVersion.parse(name), one) for name, n in found.items() for one in range(there[name] + 1, n + 1)
        )
        self._put_all("refused", [archive.refused_path(self._folder.refused_groups, *one) for one in lacking])
        return tuple(found.items())

    def _put_piece(self, piece: Piece, data: bytes) -> None:
        self._made.add(piece.key)
        self._upload(piece.key, data)

    def _key(self, path: Path) -> str:
        return path.relative_to(self._folder.path).as_posix()

    def _upload(self, key: str, source: Path | bytes) -> None:
        if self._is_closed:
            raise Unavailable("the trainer has ended")
        self._bucket.upload(key, source)

    def _commit(self, head: BucketHead) -> None:
        """Puts the head in the place of our last one, and removes what it does not name: of ours, and at first of
        trainers before.
        """
        before = self._head
        assert before is not None
        for _ in range(_TRIES):
            try:
                self._tag = put_head(self._bucket, head, self._tag)
                break
            except Conflict:
                self._look_again(before)  # an earlier one of ours, whose answer was lost, may be there by now
        else:
            raise _restless(self._bucket)
        self._head = head
        self._made |= before.names()
        self._remove(self._made - head.names())
        self._made &= head.names()
        if not self._is_swept:
            self._sweep(head)
            self._is_swept = True

    def _look_again(self, before: BucketHead) -> None:
        """Takes the tag of the head that is there now: of this incarnation, or of an earlier one, which was put back,
        or put while there was none. Raises Fenced if it is not ours, and Unavailable if there is none, or it is cut.
        """
        found, tag = find_head(self._bucket, self._run, self._identity)
        if found is None:
            self._made |= before.names()
            bare = BucketHead(before.run, before.folder, before.beginning, before.epoch, before.epochs)
            self._begin_anew(bare, tag)
            raise Unavailable(f"{self._bucket.address} has lost its {HEAD}: it is filled again")
        if found.folder != before.folder or found.epoch > before.epoch:
            raise Fenced("another trainer of the run has begun, in the bucket")
        self._tag = tag

    def _sweep(self, head: BucketHead) -> None:
        """What trainers before this one put that no head names."""
        there = set[str]()
        for key in (*self._bucket.keys("checkpoints"), *self._bucket.keys("lines")):
            kind, name, *_ = key.split("/")
            version = WeightVersion.of_name(name) if kind == "checkpoints" else None
            if version is not None and version.epoch < head.epoch:
                there.add(f"{kind}/{name}")
            elif kind == "lines" and name[:1] == "e" and name[1:].isdecimal() and int(name[1:]) < head.epoch:
                there.add(key)
        self._remove((there - head.names()) | set(self._undone(head)))

    def _undone(self, head: BucketHead) -> Iterable[str]:
        """Groups and records of steps that were undone, or never got into a head, and of refusals likewise."""
        began, refused = {WeightVersion(*one) for one in head.lineage}, dict(head.refused)
        for key in (*self._bucket.keys("archive"), *self._bucket.keys("refused")):
            if not (match := _STEP.match(key)) or (version := WeightVersion(int(match[1]), int(match[2]))) in began:
                continue
            named = int(match[3]) <= refused.get(str(version), 0) if match[3] else head.has(version)
            if version.epoch < head.epoch and not named:
                yield key

    def _remove(self, names: set[str]) -> None:
        """Of a checkpoint the manifest first; nothing once the head is not ours any more."""
        if not names or self._head is None or self._bucket.read(HEAD, MAX_BYTES) != self._head.to_json():
            return
        for name in sorted(names):
            keys = self._bucket.keys(name) if name.startswith("checkpoints/") else [name]
            self._bucket.remove(sorted(keys, key=lambda key: not key.endswith(MANIFEST)))


def _files_of(checkpoint: Path) -> list[str]:
    """The manifest last. Raises OSError, WeightsError."""
    manifest, (_, optimizer) = checkpoint_files.read_manifest(checkpoint), states.read(checkpoint)
    return [*(file.name for file in (*manifest.files, *optimizer)), STATE, MANIFEST]


def _lacking(head: BucketHead, state: TrainerState) -> list[WeightVersion]:
    """The steps up to `state` that the bucket has not, oldest first."""
    made = (WeightVersion(epoch_of(step, state.lineage) or 0, step) for step in range(state.step, 0, -1))
    return list(takewhile(lambda version: not head.has(version), made))[::-1]


def _restless(bucket: Bucket) -> Unavailable:
    return Unavailable(f"{bucket.address} changes all the time", "do other trainers of this run begin?")


def _refused(line: bytes) -> str | None:
    """The version that a line of refused steps is of; None for one that a crash tore."""
    try:
        return str(WeightVersion.parse(orjson.loads(line)["version"]))
    except (KeyError, TypeError, ValueError, DecodeError):
        return None


def _existing(path: Path) -> list[Path]:
    return [path] if path.exists() else []
