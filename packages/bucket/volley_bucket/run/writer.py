"""Upload of a run's folder to its bucket by one incarnation of the trainer.

Invariants: only steps with a durable commit record are uploaded, and all that a head names is uploaded before it. An
incarnation uploads under names of its own epoch, or files that the folder had before, so a replaced one overwrites
nothing of its successor; once the successor has claimed the head, it cannot write a head. Objects are removed only if a
later head does not name them. If the head is lost, or names lost objects, the next head is complete, and nothing is
removed before it: until then no reader sees a bucket without a step to resume from.
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

from shared.errors import ConfigError, Conflict, DecodeError, Fenced, Unavailable, WeightsError
from shared.files import storage
from shared.process import telemetry
from shared.run import archive, checkpoint_files, commits
from shared.run import state as states
from shared.run.checkpoint_files import BASE, MANIFEST, BaseWeights
from shared.run.folder import RunFolder
from shared.run.lineage import epoch_of, in_lineage
from shared.run.state import STATE, TrainerState
from shared.types import WeightVersion
from volley_bucket.objects import Bucket, Tag
from volley_bucket.run.head import HEAD, MAX_BYTES, BucketHead, Piece, find_head, other_folder, put_head
from volley_bucket.run.identity import FolderIdentity
from volley_bucket.run.lines import FollowedLines

_TRIES, _KEPT = 8, ".to-bucket"
_MANY = 32
"""For more files than this the bucket is listed first, and present files are not uploaded again."""
_STEP = re.compile(r"(?:archive|refused)/e(\d{6,18})/s(\d{6,18})(?:-(\d{1,9}))?\.(?:zst|json)\Z")
_log = telemetry.Log("bucket")


class BucketWriter:
    """Uploads a run's folder. Every method blocks, and raises as `Bucket`.

    Args:
        run_id: returns the run's identifier.
    """

    def __init__(self, bucket: Bucket, folder: RunFolder, run: str, run_id: Callable[[], str]) -> None:
        self._bucket, self._folder, self._run, self._run_id = bucket, folder, run, run_id
        self._identity: FolderIdentity | None = None
        self._head: BucketHead | None = None  # as this incarnation wrote it; without a step if it was lost
        self._tag: Tag | None = None
        self._lines, self._made = FollowedLines(folder, self._put_piece), set[str]()
        self._is_swept = self._is_closed = False

    @property
    def is_claimed(self) -> bool:
        return self._head is not None

    @property
    def step(self) -> int | None:
        """Newest step in the head that this incarnation wrote."""
        return None if self._head is None or self._head.version is None else self._head.version.step

    def close(self) -> None:
        """Make a running upload raise Unavailable before its next object."""
        self._is_closed = True

    def check(self) -> bool:
        """True if the bucket is new or this folder's; False if it lost its head, so the owner is unknown.

        Raises ConfigError if it is another run's, has continued from another folder, or this folder has lost files.
        """
        self._lines.look()
        shutil.rmtree(self._folder.path / _KEPT, ignore_errors=True)
        identity = FolderIdentity.read(self._folder.bucket)
        found, _ = find_head(self._bucket, self._run, identity)
        if found is not None:
            self._check_ours(found, "" if identity is None else identity.folder, found.epoch)
        return found is not None or identity is None or self._bucket.address not in identity.owns

    def check_known(self) -> None:
        """Raise as `check` does, and Unavailable if it returns False."""
        if not self.check():
            raise Unavailable(
                f"{self._bucket.address} has lost its {HEAD}, and the queue knows of a later trainer than this folder",
                "wait for the running trainer, which writes it again; if none runs, choose another run.bucket",
            )

    def claim(self, epoch: int) -> None:
        """Claim the bucket: earlier trainers can no longer write a head.

        If the head, or an object that it names, was lost, this holds only from this trainer's next head on.

        Raises ConfigError as `check`, and Fenced if a later epoch was claimed.
        """
        identity = FolderIdentity.read(self._folder.bucket) or FolderIdentity.draw()
        for _ in range(_TRIES):
            found, tag = find_head(self._bucket, self._run, identity)
            seen = tuple(sorted(archive.epochs(self._folder.archive)))
            bare = BucketHead(self._run, identity.folder, self._run_id(), epoch, seen)
            is_owned = found is None and self._bucket.address in identity.owns
            is_lost = is_owned and (tag is not None or not self._bucket.is_empty())
            found = found or bare
            self._check_ours(found, identity.folder, epoch)
            self._lines.begin(found.lines, self._bucket.address)
            self._identity = identity.owning(self._bucket.address)
            self._identity.write(self._folder.bucket)
            if is_lost or self._has_lost(found):
                self._upload_all_again(bare, tag)
                return
            head = replace(found, epoch=epoch, epochs=seen, beginning=bare.beginning)
            with suppress(Conflict):
                self._tag, self._head = put_head(self._bucket, head, tag), head
                return
        raise _keeps_changing(self._bucket)

    def _has_lost(self, head: BucketHead) -> bool:
        """True if the bucket lacks groups, lines, or checkpoint files that the head names."""
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
            with suppress(WeightsError, OSError):  # removed from the folder: only its manifest is looked for
                named |= {f"{below}/{file}" for file in _files_of(self._folder.checkpoints / name)}
            named.add(f"{below}/{MANIFEST}")
        if lost := named - there:
            _log.warning("the bucket has lost objects that its head names", n=len(lost), one=min(lost))
        return bool(lost)

    def _upload_all_again(self, bare: BucketHead, tag: Tag | None) -> None:
        """Upload everything again, and then a head that replaces the one with `tag`; present objects stay."""
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
                raise self._older_copy(str(made))
        named = {epoch for epoch in (found.epoch, *(epoch for epoch, _ in found.lineage)) if epoch}
        if unseen := named - {*archive.epochs(self._folder.archive)}:
            raise self._older_copy(f"epoch {min(unseen)}")

    def _older_copy(self, has: str) -> ConfigError:
        return ConfigError(
            f"{self._bucket.address} has {has}, which this folder lacks: the folder is an older copy, or has lost a"
            " part of its archive",
            "to resume from the bucket, move this folder away; or choose another run.bucket",
        )

    def upload(self, state: TrainerState, saved: WeightVersion) -> None:
        """Upload the log up to `state`, which is durable, and the checkpoint `saved` that leads there.

        A checkpoint may take long. So if one that the bucket has also leads to `state`, the log is uploaded first, with
        a head of its own.

        Raises Fenced if another trainer has claimed the bucket, FileNotFoundError or WeightsError if the checkpoint was
        removed or is damaged.
        """
        head = self._head
        assert head is not None
        is_new = head.lineage == state.lineage and str(saved) not in dict(head.checkpoints)
        if is_new and self._has_records(head, state):
            self._put_log(head, state, WeightVersion.parse(head.checkpoints[-1][0]))
            head = self._put_head(head, state, head.checkpoints)
        self._put_log(head, state, saved)
        self._put_head(head, state, self._put_checkpoints(head, state, saved))

    def _put_head(self, head: BucketHead, state: TrainerState, checkpoints: tuple[tuple[str, str], ...]) -> BucketHead:
        """Upload lines and groups of refused steps, then write a head that names them; return the head."""
        lines, refused = self._lines.put(state.version, head.epoch), self._put_refused(head)
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
        """True if the folder has the commit records of all steps that the bucket lacks: see `RunBucket.needed_step`."""
        return all(commits.path_of(self._folder.archive, version).exists() for version in _lacking(head, state))

    def _put_checkpoints(
        self, head: BucketHead, state: TrainerState, saved: WeightVersion
    ) -> tuple[tuple[str, str], ...]:
        """Upload the checkpoint `saved` and the reference; return them and the checkpoint before `saved`."""
        before = [
            (name, digest)
            for name, digest in head.checkpoints
            if in_lineage(version := WeightVersion.parse(name), state.lineage) and version < saved
        ]
        reference = [self._put_checkpoint(head, state.reference)] if state.reference not in (None, str(saved)) else []
        newest = self._put_checkpoint(head, str(saved))
        return (*reference, *[one for one in before if one not in reference][-1:], newest)

    def _put_checkpoint(self, head: BucketHead, name: str | None) -> tuple[str, str]:
        """Upload a checkpoint; return its name and the digest of its manifest."""
        folder = self._folder.checkpoints / str(name)
        made = folder.name, blake3.blake3((folder / MANIFEST).read_bytes()).hexdigest()
        if made not in head.checkpoints:
            with self._linked(folder) as kept:
                self._put_files(kept)
            _log.info("checkpoint is in the bucket", version=folder.name, bucket=self._bucket.address)
        return made

    @contextmanager
    def _linked(self, folder: Path) -> Iterator[Path]:
        """Hard-link a checkpoint, so that retention cannot remove it during the upload."""
        kept = self._folder.path / _KEPT
        shutil.rmtree(kept, ignore_errors=True)
        try:
            kept.mkdir()
            storage.link_tree(folder, kept / folder.name)
            yield kept / folder.name
        finally:
            shutil.rmtree(kept, ignore_errors=True)

    def _put_files(self, folder: Path) -> None:
        """Upload a checkpoint's files, the manifest last."""
        manifest = checkpoint_files.read_manifest(folder)
        below = f"checkpoints/{folder.name}"
        self._made.add(below)
        if manifest.adapter is not None:
            self._put_base(manifest.adapter.base)
        for name in _files_of(folder):
            self._upload(f"{below}/{name}", folder / name)

    def _put_base(self, base: BaseWeights) -> None:
        """Upload the base of adapters once; an object in the bucket is complete."""
        folder = base.folder(self._folder.checkpoints)
        there = set(self._bucket.keys(f"checkpoints/{BASE}/{base.digest}"))
        for file in base.files:
            if (key := self._key(folder / file.name)) not in there:
                self._upload(key, folder / file.name)

    def _put_log(self, head: BucketHead, state: TrainerState, saved: WeightVersion) -> None:
        """Upload groups and records of steps that the bucket lacks; records up to the checkpoint may be missing."""
        root, paths = self._folder.archive, list[Path]()
        for version in _lacking(head, state):
            record = commits.path_of(root, version)
            paths += [archive.path_of(root, version), *([record] if version.step > saved.step else _existing(record))]
        for began in state.lineage:
            if began not in head.lineage:
                paths += _existing(commits.path_of(root, WeightVersion(*began)))
        self._put_all("archive", paths)

    def _put_all(self, top: str, paths: Sequence[Path]) -> None:
        """Upload files that never change.

        Of many, those in the bucket are skipped, so an upload that is often interrupted still ends.
        """
        there = self._bucket.sizes(top) if len(paths) > _MANY else {}
        for path in paths:
            key = self._key(path)
            if key not in there or there[key] != path.stat().st_size:
                self._upload(key, path)

    def _put_refused(self, head: BucketHead) -> tuple[tuple[str, int], ...]:
        """Upload the groups of refused steps whose lines are in the bucket."""
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
        """Replace this incarnation's last head, then remove objects that the new one does not name.

        They are this incarnation's, and, the first time, those of earlier trainers.
        """
        before = self._head
        assert before is not None
        for _ in range(_TRIES):
            try:
                self._tag = put_head(self._bucket, head, self._tag)
                break
            except Conflict:
                self._look_again(before)  # an earlier head of ours, whose response was lost, may be there by now
        else:
            raise _keeps_changing(self._bucket)
        self._head = head
        self._made |= before.names()
        self._remove(self._made - head.names())
        self._made &= head.names()
        if not self._is_swept:
            self._sweep(head)
            self._is_swept = True

    def _look_again(self, before: BucketHead) -> None:
        """Take the tag of the present head, written by this incarnation or, late, by an earlier one.

        Raises Fenced if the head is another trainer's, and Unavailable if it is lost or truncated.
        """
        found, tag = find_head(self._bucket, self._run, self._identity)
        if found is None:
            self._made |= before.names()
            bare = BucketHead(before.run, before.folder, before.beginning, before.epoch, before.epochs)
            self._upload_all_again(bare, tag)
            raise Unavailable(f"{self._bucket.address} has lost its {HEAD}: everything is uploaded again")
        if found.folder != before.folder or found.epoch > before.epoch:
            raise Fenced("another trainer of the run has begun, in the bucket")
        self._tag = tag

    def _sweep(self, head: BucketHead) -> None:
        """Remove objects of earlier trainers that the head does not name."""
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
        """Yield keys of steps and refusals of earlier trainers that the head does not have."""
        began, refused = {WeightVersion(*one) for one in head.lineage}, dict(head.refused)
        for key in (*self._bucket.keys("archive"), *self._bucket.keys("refused")):
            if not (match := _STEP.match(key)) or (version := WeightVersion(int(match[1]), int(match[2]))) in began:
                continue
            named = int(match[3]) <= refused.get(str(version), 0) if match[3] else head.has(version)
            if version.epoch < head.epoch and not named:
                yield key

    def _remove(self, names: set[str]) -> None:
        """Remove objects, a checkpoint's manifest first; nothing if the head is no longer this incarnation's."""
        if not names or self._head is None or self._bucket.read(HEAD, MAX_BYTES) != self._head.to_json():
            return
        for name in sorted(names):
            keys = self._bucket.keys(name) if name.startswith("checkpoints/") else [name]
            self._bucket.remove(sorted(keys, key=lambda key: not key.endswith(MANIFEST)))


def _files_of(checkpoint: Path) -> list[str]:
    """List a checkpoint's files, the manifest last. Raises OSError, WeightsError."""
    manifest, (_, optimizer) = checkpoint_files.read_manifest(checkpoint), states.read(checkpoint)
    return [*(file.name for file in (*manifest.files, *optimizer)), STATE, MANIFEST]


def _lacking(head: BucketHead, state: TrainerState) -> list[WeightVersion]:
    """List the steps up to `state` that the bucket lacks, oldest first."""
    made = (WeightVersion(epoch_of(step, state.lineage) or 0, step) for step in range(state.step, 0, -1))
    return list(takewhile(lambda version: not head.has(version), made))[::-1]


def _keeps_changing(bucket: Bucket) -> Unavailable:
    return Unavailable(f"the {HEAD} of {bucket.address} keeps changing", "stop all trainers of this run but one")


def _refused(line: bytes) -> str | None:
    """Return the version of a line of refused.jsonl; None for a torn line."""
    try:
        return str(WeightVersion.parse(orjson.loads(line)["version"]))
    except (KeyError, TypeError, ValueError, DecodeError):
        return None


def _existing(path: Path) -> list[Path]:
    return [path] if path.exists() else []
