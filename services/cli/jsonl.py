"""Reading JSON lines that another process is still writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson


class Tail:
    """The complete lines added to a file since the last call; a file that is not there yet has none.

    A file that has become shorter has lost lines at its end (a rolled-back step); what follows is new.
    Lines that do not parse are skipped: a writer that was killed may leave half a line, and its successor starts a new one.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                self._offset = min(self._offset, os.fstat(file.fileno()).st_size)
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [record for record in map(_parse, complete.splitlines()) if record is not None]


def read(path: Path) -> list[dict[str, Any]]:
    """All complete lines."""
    return Tail(path).new()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
