"""Read JSON lines that another process is still writing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.errors import ConfigError, DecodeError
from shared.files.reading import ended_lines, open_file


class JsonlTail:
    """Reads the complete lines added to a file since the last call; none if the file does not exist yet.

    A file that became shorter has lost lines at its end (a rolled-back step); lines added after that are new. Lines
    that do not parse are skipped: a killed writer may leave half a line, and its successor starts a new one. Lines with
    more values than any record are skipped too.

    `offset` is the position after the last line read, in bytes.
    """

    def __init__(self, path: Path, *, from_end: bool = False, offset: int = 0) -> None:
        self._path = path
        self.offset = path.stat().st_size if from_end and path.exists() else offset
        self._last: tuple[int, bytes] = (0, b"")

    def is_undone(self) -> bool:
        """True if the file no longer holds the last line that was read, where it was: later ones replaced it."""
        size, line = self._last
        try:
            with open_file(self._path) as file:
                file.seek(self.offset - size)
                return file.read(len(line)) != line
        except OSError:
            return size > 0

    def restart(self) -> None:
        """Begin again at the start of the file."""
        self.offset, self._last = 0, (0, b"")

    def new(self) -> list[dict[str, Any]]:
        return list(self.records())

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records that `new` returns; `offset` moves with each."""
        try:
            with open_file(self._path) as file:
                self.offset = min(self.offset, os.fstat(file.fileno()).st_size)
                file.seek(self.offset)
                yield from (record for record in map(_parse, self._complete(file)) if record is not None)
        except FileNotFoundError:
            return
        except OSError as error:
            hint = "check the folder with `volley verify`"
            raise ConfigError(f"{self._path}: {error.strerror}", hint) from error

    def _complete(self, file: IO[bytes]) -> Iterator[bytes]:
        for size, line in ended_lines(file):
            self.offset += size
            self._last = size, line
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


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = codec.from_record(line, "a line", MAX_LINE_VALUES)
    except DecodeError:
        return None
    return value if isinstance(value, dict) else None
