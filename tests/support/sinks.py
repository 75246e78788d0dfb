"""A sink that keeps what it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shared.process.sinks import Line, LineKind


class KeepingSink:
    """`on_write` is called with each line before it is kept."""

    def __init__(self, name: str = "kept", on_write: Callable[[Mapping[str, Any]], object] = lambda line: None) -> None:
        self.name, self.on_write = name, on_write
        self.lines: list[tuple[str, Mapping[str, Any]]] = []
        self.closed = False

    def write(self, kind: LineKind, line: Line) -> None:
        self.on_write(line)
        self.lines.append((kind, line))

    def close(self) -> None:
        self.closed = True


def raising(error: BaseException) -> Callable[[object], None]:
    def write(_line: object) -> None:
        raise error

    return write
