"""Commit records of a run: `archive/e000001/s000042.json` says that e000001-s000042 was made.

A record holds the `TrainerState` after its step, and a checksum of the trained parameters: all that a trainer needs to
resume there, except the arrays. Each epoch has one more record, of its start. From the newest whole record, the
archived groups before it and any checkpoint among its ancestors, the weights can be recomputed: the log is the run, and
a checkpoint only a shortcut.

Invariants:
- A record is whole or absent (written to a temporary name, fsynced, renamed, parent fsynced), and its groups are
  archived before it.
- Once `fence` has returned, no trainer of an earlier epoch adds a record: drafts are made in the folder of their epoch,
  and `fence` creates its epoch's folder and removes all earlier ones.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import blake3
import orjson

from shared import codec
from shared.errors import DecodeError, Unavailable, WeightsError
from shared.files.reading import read_file
from shared.files.storage import fsync, storage
from shared.run import archive, checkpoint_files
from shared.run import state as states
from shared.run.folder import RunFolder
from shared.run.lineage import surviving
from shared.run.state import TrainerState
from shared.types import WeightVersion

SCHEMA = 1
_NAME = re.compile(r"e(\d{6,})/s(\d{6,})\.json\Z")
_DRAFTS = ".commits-"
_MOST_CHECKSUM = 128
_KEYS = frozenset(("schema", "run", "checksum", "state", "seal"))
_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """`state` after the step, or at the start of its epoch; `checksum` of the trained parameters at that point."""

    run: str
    checksum: str
    state: TrainerState

    @property
    def version(self) -> WeightVersion:
        return self.state.version

    def to_json(self) -> bytes:
        record = {"schema": SCHEMA, "run": self.run, "checksum": self.checksum, "state": asdict(self.state)}
        return orjson.dumps({**record, "seal": _seal(record)})

    @classmethod
    def from_mapping(cls, raw: Any) -> Self:
        """Parse a record. Raises WeightsError if it is malformed or was changed."""
        if not isinstance(raw, dict) or raw.keys() != _KEYS or raw["schema"] != SCHEMA:
            raise WeightsError(f"not a commit record of schema {SCHEMA}")
        run, checksum = raw["run"], raw["checksum"]
        if not isinstance(run, str) or not isinstance(checksum, str) or len(checksum) > _MOST_CHECKSUM:
            raise WeightsError("run or checksum is not text")
        if raw["seal"] != _seal({key: value for key, value in raw.items() if key != "seal"}):
            raise WeightsError("it was changed after it was written: its seal differs")
        return cls(run, checksum, TrainerState.from_mapping(raw["state"]))


class CommitLog:
    """Write the records of one run, beside its archived groups.

    Args:
        root: the archive's folder.
    """

    def __init__(self, root: Path, run: str) -> None:
        self.root, self._run = root, run

    def fence(self, epoch: int) -> None:
        """Create the drafts' folder of `epoch`, which is claimed, and remove those of earlier epochs.

        A trainer that still writes a record there ends with Fenced. Raises StorageFull.
        """
        with storage(self.root):
            (self.root / _drafts(epoch)).mkdir(exist_ok=True)
            fsync(self.root)
        for folder in self.root.glob(f"{_DRAFTS}*"):
            of = folder.name.removeprefix(f"{_DRAFTS}e")
            if not of.isdecimal() or int(of) < epoch:
                self._remove(folder)

    def append(self, state: TrainerState, checksum: str) -> None:
        """Make the record of `state.version` durable; its groups are archived. May be repeated.

        Raises StorageFull, WeightsError if the record is larger than a reader accepts, and Fenced if a later epoch has
        called `fence`; then no record is written.
        """
        version = state.version
        text = CommitRecord(self._run, checksum, state).to_json()
        if len(text) > states.MAX_STATE_BYTES:
            raise WeightsError(f"the commit record of {version} has {len(text)} bytes, more than a reader accepts")
        path, draft = path_of(self.root, version), self.root / _drafts(version.epoch) / str(version)
        with storage(self.root):
            try:
                draft.write_bytes(text)
                fsync(draft)
                draft.rename(path)
                fsync(path.parent)
            except OSError:
                draft.unlink(missing_ok=True)
                raise

    def forget(self, before: int) -> None:
        """Remove the records of steps before `before`, the oldest retained checkpoint's step. Best effort."""
        for version in versions(self.root):
            if version.step < before:
                with suppress(OSError):
                    path_of(self.root, version).unlink(missing_ok=True)

    def _remove(self, drafts: Path) -> None:
        """Remove a drafts' folder, renamed first so that a writer cannot use it meanwhile."""
        away = self.root / f"{_DRAFTS}removed-{drafts.name.removeprefix(_DRAFTS)}-{os.getpid()}"
        with suppress(FileNotFoundError):
            drafts.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def path_of(root: Path, version: WeightVersion) -> Path:
    return archive.path_of(root, version).with_suffix(".json")


def versions(root: Path) -> list[WeightVersion]:
    """Return the versions that have a record, oldest first; none if `root` is missing."""
    matches = map(_NAME.match, archive.names(root, ".json"))
    return sorted(WeightVersion(int(m[1]), int(m[2])) for m in matches if m)


def read(root: Path, version: WeightVersion) -> CommitRecord:
    """Read a record. Raises WeightsError if it is missing or damaged, and Unavailable if it cannot be read now."""
    path = path_of(root, version)
    try:
        text = read_file(path, states.MAX_STATE_BYTES)
        record = CommitRecord.from_mapping(codec.from_record(text, path.name, states.MOST_VALUES))
    except OSError as error:
        raise checkpoint_files.unreadable(str(path), error) from error
    except (DecodeError, WeightsError) as error:
        raise WeightsError(f"{path} cannot be used: {error.detail}"[:_MAX_DETAIL]) from error
    if record.version != version:
        raise WeightsError(f"{path} is the record of {record.version}")
    return record


def committed(folder: RunFolder) -> list[WeightVersion]:
    """Return the versions that a record or checkpoint makes durable and that no later trainer undid; oldest first."""
    return surviving(_all(folder))


def _all(folder: RunFolder) -> list[WeightVersion]:
    return sorted({*checkpoint_files.versions(folder.checkpoints), *versions(folder.archive)})


def newest(folder: RunFolder) -> TrainerState | None:
    """Return the newest readable state in a record or a checkpoint; None without one.

    A checkpoint's digests are not checked. An undone state is returned only if there is no other.
    """
    known = _all(folder)
    alive = surviving(known)
    for version in reversed([*sorted({*known} - {*alive}), *alive]):
        with suppress(WeightsError, Unavailable):
            return read(folder.archive, version).state
        with suppress(WeightsError, Unavailable):  # damaged, or removed by the trainer meanwhile
            state, _ = states.read(folder.checkpoints / str(version))
            return replace(state, epoch=version.epoch, step=version.step)
    return None


def metrics(root: Path) -> list[Mapping[str, Any]]:
    """Return the lines of metrics in all retained records, the newest record's first."""
    lines: list[Mapping[str, Any]] = []
    for version in reversed(versions(root)):
        with suppress(WeightsError, Unavailable):
            lines += read(root, version).state.metrics
    return lines


def _seal(record: Mapping[str, Any]) -> str:
    return blake3.blake3(orjson.dumps(record, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _drafts(epoch: int) -> str:
    return f"{_DRAFTS}e{epoch:06d}"
