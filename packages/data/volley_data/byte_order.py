"""Encodings that a data file may have."""

from __future__ import annotations

import codecs

MAX_LINE_BYTES = 2**26
"""Longest line of a data file, in bytes."""
UTF_8 = "utf-8"
_MARKS = (
    (codecs.BOM_UTF8, UTF_8),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks; UTF-32's starts with UTF-16's."""


def mark_of(head: bytes) -> tuple[bytes, str]:
    """Return the byte order mark that a file begins with, and its encoding; without one, none and UTF-8."""
    return next(((mark, name) for mark, name in _MARKS if head.startswith(mark)), (b"", UTF_8))
