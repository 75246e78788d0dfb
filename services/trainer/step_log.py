"""Append-only files with one line for each step: metrics and handovers.

Invariants: a file has at most one line for a step, and none of an undone step. Only a trainer that has fenced all
others repairs a file: until then an older trainer may still write to it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.errors import DecodeError, StorageUnavailable
from shared.files import storage
from shared.process import telemetry
from shared.run.archive import Archive
from shared.run.lineage import in_lineage
from shared.run.state import TrainerState
from shared.types import WeightVersion

_log = telemetry.Log("ledger")


_MOST_UNWRITTEN = 10_000


type Check = Callable[[], object]
"""Raises Fenced if a later trainer has begun."""


class StepLog:
    """JSON lines, each with a `step`, and in RL a `version`.

    An append never fails the step: a line that cannot be written now is kept in memory and written before the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._unwritten, self._one = path, list[bytes](), threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, *lines: Mapping[str, Any], check: Check = lambda: None) -> None:
        """Append lines. If `check`, called once the file is open, raises, nothing is written and the error propagates.

        A trainer that repairs the file after the check replaces it, so its new file does not get the line.
        """
        with self._one:
            self._unwritten = [*self._unwritten, *(_text([line]) for line in lines)][-_MOST_UNWRITTEN:]
            self._write(check)

    def _write(self, check: Check) -> None:
        try:
            storage.append(self._path, b"".join(self._unwritten), durable=False, check=check)
        except (StorageUnavailable, OSError) as error:
            _log.warning("line kept back", file=self._path.name, lines=len(self._unwritten), reason=str(error))
        else:
            self._unwritten = []

    def clear(self) -> None:
        """Empty the file. Raises StorageFull."""
        self._keep([])

    def flush(self, check: Check = lambda: None) -> bool:
        """Make every line durable; return False if some cannot be now. Raises as `append`."""
        with self._one:
            if self._unwritten:
                self._write(check)
        try:
            if self._path.exists():
                storage.fsync(self._path)
                storage.fsync(self._path.parent)
        except OSError as error:
            _log.warning("lines are not durable yet", file=self._path.name, reason=str(error))
            return False
        return not self._unwritten

    def repair(
        self, state: TrainerState, epoch: int, lost: Sequence[Mapping[str, Any]] = (), *, check: Check = lambda: None
    ) -> None:
        """Bring the file in line with the checkpoint. Durable when it returns.

        Removes damaged lines, all but the first line of a version, and lines of trainers before `epoch` whose steps the
        checkpoint does not contain. Inserts, by version, the lines of `lost` that belong to the checkpoint's steps and
        are missing.

        Raises StorageFull, and any error of `check`, which is called right before the file is replaced.
        """
        there: dict[WeightVersion, Mapping[str, Any]] = {}
        for line, version in filter(None, map(_parsed, storage.whole_lines(self._path))):
            if version.epoch >= epoch or _contains(state, version):
                there.setdefault(version, line)
        n_found = len(there)
        for line in lost:
            if _contains(state, version := WeightVersion.parse(line["version"])):
                there.setdefault(version, line)
        self._keep([there[version] for version in (sorted(there) if len(there) > n_found else there)], check)

    def _keep(self, lines: Sequence[Mapping[str, Any]], check: Check = lambda: None) -> None:
        text = _text(lines)
        changed = (self._path.read_bytes() if self._path.exists() else b"") != text
        storage.replace(self._path, text, check)  # even if unchanged: an older trainer may have it open
        if changed:
            _log.info("file brought in line with the checkpoint", file=self._path.name, lines=len(lines))


class FencedLog:
    """A `StepLog` that only the newest trainer can write.

    Once another trainer has begun, and so repaired the file, every call raises Fenced and writes nothing. The queue
    would fence this trainer too, but later.
    """

    def __init__(self, log: StepLog, archive: Archive, epoch: int) -> None:
        self._log, self._archive, self._epoch = log, archive, epoch

    async def append(self, line: Mapping[str, Any]) -> None:
        await asyncio.to_thread(self._log.append, line, check=self._check)

    async def flush(self) -> bool:
        """Make every line durable; return False if some cannot be now."""
        await asyncio.to_thread(self._check)
        return await asyncio.to_thread(self._log.flush, self._check)

    def _check(self) -> None:
        self._archive.check_newest(self._epoch)


def _parsed(line: bytes) -> tuple[dict[str, Any], WeightVersion] | None:
    try:
        value = codec.from_record(line, "a line of metrics", MAX_LINE_VALUES)
        version = WeightVersion.parse(value["version"])
        return (value, version) if value["step"] == version.step else None
    except (KeyError, TypeError, DecodeError):
        return None


def _contains(state: TrainerState, version: WeightVersion) -> bool:
    return version.step <= state.step and in_lineage(version, state.lineage)


def _text(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for line in lines)
