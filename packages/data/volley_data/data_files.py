"""Rows of data files: JSON lines or one JSON array, plain or gzip, in UTF-8, UTF-16 or UTF-32.

A row comes with its place, which every error about it names. The content decides the format, and the name only for CSV.
Only blank lines are skipped, and nothing is read without a limit. `volley_data.tables` reads CSV, Parquet and Arrow.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import orjson

from shared.errors import ConfigError
from shared.files.reading import open_file
from shared.text import without_halves
from volley_data.byte_order import MAX_LINE_BYTES, UTF_8, mark_of

MAX_ARRAY_BYTES = 2**30
"""Largest file with one JSON array, uncompressed: it is parsed at once."""
_BUFFER_BYTES = 2**20
_GZIP = b"\x1f\x8b"
_TABLES = (".csv", ".tsv", ".arrow")
_TABLE_MARKS = (b"PAR1", b"ARROW1")
_FOREIGN = (
    (b"PAR1", "a compressed Parquet file", "unpack it first"),
    (b"(\xb5/\xfd", "compressed with zstd", "unpack it first, or compress it with gzip"),
    (b"BZh", "compressed with bzip2", "unpack it first, or compress it with gzip"),
    (b"\xfd7zXZ", "compressed with xz", "unpack it first, or compress it with gzip"),
    (b"PK\x03\x04", "a zip file", "unpack it first"),
    (b"{\0", "UTF-16 without a byte order mark", "save it as UTF-8"),
    (b"\0{", "UTF-16 without a byte order mark", "save it as UTF-8"),
)
_ONE_VALUE = "write one record per line, or one array of records: jq -c '.[]'"


def rows(file: Path, hint: str = "give an existing file") -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of every row; a value may be any JSON value.

    Raises ConfigError naming the file, and the line or record that cannot be read. Args: hint: of the error for a
    missing file.
    """
    if _is_table(file):
        from volley_data import tables  # which reads text as this module does

        yield from tables.rows(file, hint)
        return
    try:
        with open_file(file) as raw, io.BufferedReader(cast(io.RawIOBase, raw), _BUFFER_BYTES) as opened:
            if opened.peek(2)[:2] != _GZIP:
                yield from _values(opened, file)
                return
            with gzip.open(opened) as unpacked, io.BufferedReader(cast(io.RawIOBase, unpacked), _BUFFER_BYTES) as plain:
                yield from _values(plain, file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{file} cannot be unpacked: {error}", "is the file complete?") from error
    except UnicodeError as error:
        raise ConfigError(f"{file} cannot be read as text: {error}", "save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"data file {file}: {error.strerror or error}", hint) from error


def _is_table(file: Path) -> bool:
    if file.suffix.lower() in _TABLES:
        return True
    with suppress(OSError), open_file(file) as opened:
        return opened.read(6).startswith(_TABLE_MARKS)
    return False


def _values(opened: io.BufferedReader[Any], file: Path) -> Iterator[tuple[str, Any]]:
    text = _as_utf8(opened, file)
    n_skipped = 0
    while (first := text.peek(1)[:1]).isspace():
        n_skipped += text.read(1) == b"\n"
    if first == b"[":
        yield from _array(text, file)
        return
    is_first = True
    for n, line in enumerate(iter(lambda: text.readline(MAX_LINE_BYTES + 1), b""), n_skipped + 1):
        place = f"{file}, line {n}"
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{place} has more than {MAX_LINE_BYTES} bytes", "a line must be one record")
        if not (line := line.strip()):
            continue
        if is_first and line == b"{":
            raise ConfigError(f"{file} is one JSON value, not one record per line", _ONE_VALUE)
        is_first = False
        yield place, _parsed(line, place)


def _array(text: io.BufferedReader[Any], file: Path) -> Iterator[tuple[str, Any]]:
    whole = text.read(MAX_ARRAY_BYTES + 1)
    if len(whole) > MAX_ARRAY_BYTES:
        raise ConfigError(f"{file} is one array of more than {MAX_ARRAY_BYTES} bytes", _ONE_VALUE)
    for n, value in enumerate(_parsed(whole, f"{file}, one array,"), 1):
        yield f"{file}, record {n}", value


def _as_utf8(opened: io.BufferedReader[Any], file: Path) -> io.BufferedReader[Any]:
    """Return the file after its byte order mark, as UTF-8."""
    head = opened.peek(6)[:6]
    for sign, what, hint in _FOREIGN:
        if head.startswith(sign):
            raise ConfigError(f"{file} is {what}", hint)
    mark, encoding = mark_of(head)
    opened.read(len(mark))
    return opened if encoding == UTF_8 else io.BufferedReader(_Recoded(opened, encoding), _BUFFER_BYTES)


class _Recoded(io.RawIOBase):
    """Text of another encoding, recoded to UTF-8. Raises UnicodeError."""

    def __init__(self, source: IO[bytes], encoding: str) -> None:
        self._source, self._decoder, self._ready = source, codecs.getincrementaldecoder(encoding)(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        block = b" "
        while not self._ready and block:
            block = self._source.read(_BUFFER_BYTES)
            self._ready = self._decoder.decode(block, final=not block).encode()
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n


def _parsed(line: bytes, place: str) -> Any:
    try:
        return orjson.loads(without_halves(line))
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"{place} is not JSON: {error.msg}, at character {error.pos + 1}",
            "write one record per line, or one array, in UTF-8; is the file complete?",
        ) from error
