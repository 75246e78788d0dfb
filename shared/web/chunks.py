"""Check a chunked body's framing before the HTTP parser, which accepts and awaits any 64-bit size.

Strictly RFC 9112, 7.1: `size [;extension] CRLF data CRLF … 0 CRLF trailers CRLF`. Announced sizes are added up, so a
body that is too large is refused before it arrives.
"""

from __future__ import annotations

import re

MAX_LINE = 1024
"""Largest size line (with its extension) or trailer, in bytes."""
MAX_ASIDE = 16 * 1024
"""Largest sum of all extensions and trailers of a body, in bytes."""

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(;[^\r\n]*)?\r\n")


class ChunkError(Exception):
    """Refused framing.

    Args: reason: in two words; status: 400 for malformed chunks, 413 for a body that announces more bytes than allowed,
    431 for too many bytes of framing.
    """

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status


class Chunks:
    """One chunked body, from the first byte after the head. Args: limit: largest body, in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line = bytearray()
        self._announced = self._to_come = self._aside = 0
        self._in_trailers = False
        self.ended = False

    def take(self, data: bytes) -> int:
        """Return how many bytes of `data` belong to the body. Raises ChunkError."""
        at = 0
        while at < len(data) and not self.ended:
            if self._to_come:
                n = min(self._to_come, len(data) - at)
                self._to_come -= n
                at += n
                continue
            end = data.find(b"\n", at, at + MAX_LINE)
            stop = end + 1 if end >= 0 else min(len(data), at + MAX_LINE)
            self._line += data[at:stop]
            at = stop
            if len(self._line) > MAX_LINE or (end < 0 and len(self._line) == MAX_LINE):
                raise ChunkError("long chunk line", 431)
            if end >= 0:
                self._end_line(bytes(self._line))
                self._line.clear()
        return at

    def _end_line(self, line: bytes) -> None:
        if self._in_trailers:
            self.ended = line == b"\r\n"
            self._count_announced(len(line))
            return
        found = _SIZE.fullmatch(line)
        if found is None:
            raise ChunkError("malformed chunk", 400)
        self._count_announced(len(found[2] or b""))
        size = int(found[1], 16)
        self._announced += size
        if self._announced > self._limit:
            raise ChunkError("large body", 413)
        self._in_trailers, self._to_come = not size, size and size + len(b"\r\n")

    def _count_announced(self, n: int) -> None:
        self._aside += n
        if self._aside > MAX_ASIDE:
            raise ChunkError("long chunk line", 431)
