"""Read JSON lines that another process is still writing."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.errors import ConfigError, DecodeError
from shared.files.reading import MAX_LINE_BYTES, ended_lines, open_file

_MOST_MARKS = 64


class Mark(NamedTuple):
    """A line that was read: its end in the file and its size, in bytes, and a digest of it."""

    end: int
    size: int
    digest: str

    def fits(self, file: IO[bytes]) -> bool:
        file.seek(self.end - self.size)
        return _digest(file.read(min(self.size - 1, MAX_LINE_BYTES))) == self.digest


class JsonlTail:
    """Reads the complete lines added to a file since the last call; none if the file does not exist yet.

    A file that became shorter has lost lines at its end (a rolled-back step); lines added after that are new. Lines
    that do not parse are skipped: a killed writer may leave half a line, and its successor starts a new one. Lines with
    more values than any record are skipped too.

    `offset` is the position after the last line read, in bytes. `marks` are the last lines read, by which `go_back`
    finds out whether they were replaced, also for a later reader; None marks none.
    """

    def __init__(
        self, path: Path, *, from_end: bool = False, offset: int = 0, marks: Iterable[Mark] | None = None
    ) -> None:
        self._path = path
        self.marks = None if marks is None else deque(marks, maxlen=_MOST_MARKS)
        self.offset = path.stat().st_size if from_end and path.exists() else offset
        self._last: tuple[int, bytes] = (0, b"")
        self._file = 0

    def is_undone(self) -> bool:
        """True if another file is there, or the last line that was read is not: later ones replaced it."""
        size, line = self._last
        try:
            with open_file(self._path) as file:
                if size and os.fstat(file.fileno()).st_ino != self._file:
                    return True
                file.seek(self.offset - size)
                return file.read(len(line)) != line
        except OSError:
            return size > 0

    def go_back(self) -> bool:
        """Go back to the last marked line that is still there, or to the start if none is. Returns True if it did."""
        if not self.marks:
            return False
        before = self.offset
        try:
            with open_file(self._path) as file:
                while self.marks and not self.marks[-1].fits(file):
                    self.marks.pop()
        except OSError:
            self.marks.clear()
        self.offset = self.marks[-1].end if self.marks else 0
        return self.offset < before

    def restart(self) -> None:
        """Begin again at the start of the file."""
        self.offset, self._last = 0, (0, b"")
        if self.marks is not None:
            self.marks.clear()

    def new(self) -> list[dict[str, Any]]:
        return list(self.records())

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records that `new` returns; `offset` moves with each."""
        try:
            with open_file(self._path) as file:
                status = os.fstat(file.fileno())
                self.offset, self._file = min(self.offset, status.st_size), status.st_ino
                file.seek(self.offset)
                yield from (record for record in map(parse, self._complete(file)) if record is not None)
        except FileNotFoundError:
            return
        except OSError as error:
            hint = "check the folder with `volley verify`"
            raise ConfigError(f"{self._path}: {error.strerror}", hint) from error

    def _complete(self, file: IO[bytes]) -> Iterator[bytes]:
        for size, line in ended_lines(file):
            self.offset += size
            self._last = size, line
            if self.marks is not None:
                self.marks.append(Mark(self.offset, size, _digest(line)))
            yield line


def read(path: Path) -> list[dict[str, Any]]:
    """All complete lines."""
    return JsonlTail(path).new()


def numbers(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line; those of a nested mapping are named KEY/NAME."""
    for key, value in line.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + key, value


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None for a line that is not a record."""
    try:
        value = codec.from_record(line, "a line", MAX_LINE_VALUES)
    except DecodeError:
        return None
    return value if isinstance(value, dict) else None


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=8).hexdigest()
