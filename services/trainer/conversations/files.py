"""Records of data files: JSON (see shared.files.rows), Parquet, Arrow, and folders of them as Hugging Face's datasets
have them.

A record comes with the place it was found at, which every error about it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from services.trainer.conversations.flags import may_say
from services.trainer.conversations.formats import COLUMNS
from shared.errors import ConfigError
from shared.files import rows

type Split = Literal["train", "eval"]
_LINES = (".jsonl", ".ndjson", ".json")
_TABLES = (".parquet", ".arrow")
_NAMES = {"train": ("train",), "eval": ("test", "validation", "valid", "eval", "dev")}
_WORD = re.compile(r"[A-Za-z]+")


def records(paths: Sequence[Path], split: Split) -> Iterator[tuple[str, Any]]:
    """(place, record) of all files in their order; of a folder those of its `split`. Raises ConfigError, also for a
    file without a record.
    """
    for path in paths:
        for file in files_of(path, split):
            found = False
            for place, record in _rows(file) if file.suffix in _TABLES else rows.rows(file):
                found = True
                yield place, record
            if not found:
                raise ConfigError(f"{file} holds no record", "is it complete?")


def files_of(path: Path, split: Split) -> list[Path]:
    """The file itself; of a folder those with the name of the split in their path, of train also all where no name
    tells. Raises ConfigError if there is none.
    """
    if not path.is_dir():
        if _kind(path) not in (*_LINES, *_TABLES):
            known = ", ".join((*_LINES, *_TABLES))
            raise ConfigError(f"{path} is no data file", f"known are {known}, those of JSON also with .gz, and folders")
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if _kind(file) in (".jsonl", ".ndjson", *_TABLES) and not any(p.startswith(".") for p in file.parts[-2:])
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


def _kind(file: Path) -> str:
    """Its suffix; of a packed one the suffix before .gz."""
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def _split_of(file: Path) -> Split | None:
    """By the first word of its name, or of a folder it lies in."""
    words = [word[0].lower() for part in (file.name, *file.parts[:-1]) if (word := _WORD.match(part))]
    splits: tuple[Split, ...] = ("train", "eval")
    return next((split for word in words for split in splits if word in _NAMES[split]), None)


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    from services.trainer.conversations import tables

    for n, row in enumerate(tables.rows(file, COLUMNS, may_say)):
        yield f"{file}, row {n}", row
