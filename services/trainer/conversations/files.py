"""The records of data files: JSON lines, Parquet, and folders of them as Hugging Face's datasets have them.

A record comes with the place it was found at, which every complaint about it names. Nothing is skipped but blank lines.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import orjson

from services.trainer.conversations.formats import COLUMNS
from shared.errors import ConfigError
from shared.files.reading import open_file

type Split = Literal["train", "eval"]
MAX_LINE_BYTES = 2**26
_BUFFER_BYTES = 2**20
_LINES = (".jsonl", ".ndjson", ".json")
_TABLES = (".parquet", ".arrow")
_NAMES = {"train": ("train",), "eval": ("test", "validation", "valid", "eval", "dev")}
_WORD = re.compile(r"[A-Za-z]+")
_FOREIGN = {
    b"\xff\xfe": "UTF-16, not UTF-8",
    b"\xfe\xff": "UTF-16, not UTF-8",
    b"\x1f\x8b": "compressed",
    b"(\xb5/\xfd": "compressed",
    b"PAR1": "Parquet: call it NAME.parquet",
}


def records(paths: Sequence[Path], split: Split) -> Iterator[tuple[str, Any]]:
    """(place, record) of all files in their order; of a folder those of its `split`. Raises ConfigError, also for a
    file without a record.
    """
    for path in paths:
        for file in files_of(path, split):
            found = False
            for place, record in _lines(file) if file.suffix in _LINES else _rows(file):
                found = True
                yield place, record
            if not found:
                raise ConfigError(f"{file} holds no record", "is it complete?")


def files_of(path: Path, split: Split) -> list[Path]:
    """The file itself; of a folder those with the name of the split in their path, of train also all where no name
    tells. Raises ConfigError if there is none.
    """
    if not path.is_dir():
        if path.suffix not in (*_LINES, *_TABLES):
            raise ConfigError(f"{path} is no data file", f"known are {', '.join((*_LINES, *_TABLES))}, and folders")
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in (".jsonl", ".ndjson", *_TABLES) and not any(p.startswith(".") for p in file.parts[-2:])
    )
    if not found:
        raise ConfigError(f"the folder {path} holds no data", "files of it end in .jsonl or .parquet")
    named = {file: _split_of(file.relative_to(path)) for file in found}
    if not any(named.values()) and split == "train":
        return found
    chosen = [file for file, its in named.items() if its == split]
    if not chosen:
        raise ConfigError(f"no file below {path} is called {' or '.join(_NAMES[split])}", "name the files themselves")
    return chosen


def _split_of(file: Path) -> Split | None:
    """By the first word of its name, or of a folder it lies in."""
    words = [word[0].lower() for part in (file.name, *file.parts[:-1]) if (word := _WORD.match(part))]
    splits: tuple[Split, ...] = ("train", "eval")
    return next((split for word in words for split in splits if word in _NAMES[split]), None)


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with open_file(file) as raw, io.BufferedReader(cast(io.RawIOBase, raw), _BUFFER_BYTES) as lines:
            n = 0
            while line := lines.readline(MAX_LINE_BYTES + 1):
                n += 1
                place = f"{file}, line {n}"
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{place} has more than {MAX_LINE_BYTES} bytes", "a line is one conversation")
                if n == 1:
                    line = _checked(line, file)
                if line.strip():
                    yield place, _parsed(line, place)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", "give an existing file") from error


def _checked(line: bytes, file: Path) -> bytes:
    """The first line without a byte order mark. Raises ConfigError if these are no JSON lines."""
    for sign, what in _FOREIGN.items():
        if line.startswith(sign):
            raise ConfigError(f"{file} is {what}", "JSON lines in UTF-8 are expected")
    line = line.removeprefix(b"\xef\xbb\xbf")
    if line.lstrip().startswith(b"[") or line.strip() == b"{":
        raise ConfigError(f"{file} is one JSON value, not a record a line", "write it as JSON lines: jq -c '.[]'")
    return line


def _parsed(line: bytes, place: str) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place} is not JSON: {error}", "a line is one record; is the file complete?") from error


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    from services.trainer.conversations import tables

    for n, row in enumerate(tables.rows(file, COLUMNS)):
        yield f"{file}, row {n}", row
