"""Records of data files: JSON (see volley_data.data_files), Parquet, Arrow, and folders in Hugging Face's layout.

Each record comes with its place, which every error about it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from shared.errors import ConfigError
from volley_data import data_files
from volley_supervised.conversations.flags import may_say
from volley_supervised.conversations.formats import COLUMNS

type Split = Literal["train", "eval"]
_LINES, _TABLES = (".jsonl", ".ndjson", ".json"), (".parquet", ".arrow")
_NAMES = {"train": ("train",), "eval": ("test", "validation", "valid", "eval", "dev")}
_WORD = re.compile(r"[A-Za-z]+")


def records(paths: Sequence[Path], split: Split) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) of all files in order; of a folder, those of its `split`.

    Raises ConfigError, also for a file without a record.
    """
    for path in paths:
        for file in files_of(path, split):
            found = False
            for place, record in _rows(file) if file.suffix in _TABLES else data_files.rows(file):
                found = True
                yield place, record
            if not found:
                raise ConfigError(f"{file} holds no record", "check that the file is complete")


def files_of(path: Path, split: Split) -> list[Path]:
    """List the file itself, or a folder's files whose path names the split.

    If no path names a split, all files are `train`. Raises ConfigError if there is none.
    """
    if not path.is_dir():
        check_file(path)
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if _kind(file) in (".jsonl", ".ndjson", *_TABLES) and not any(p.startswith(".") for p in file.parts[-2:])
    )
    if not found:
        raise ConfigError(
            f"the folder {path} holds no data", "its files must end in .jsonl, .ndjson, .parquet or .arrow"
        )
    named = {file: _split_of(file.relative_to(path)) for file in found}
    if not any(named.values()) and split == "train":
        return found
    chosen = [file for file, its in named.items() if its == split]
    if not chosen:
        raise ConfigError(f"no file below {path} is called {' or '.join(_NAMES[split])}", "name the files themselves")
    return chosen


def check_file(path: Path) -> None:
    """Raise ConfigError for a file whose name is not one of data."""
    if _kind(path) not in (*_LINES, *_TABLES):
        known = ", ".join((*_LINES, *_TABLES))
        raise ConfigError(f"{path} is not a data file", f"give {known}, JSON with .gz, or a folder")


def _kind(file: Path) -> str:
    """Return the suffix, or the one before .gz."""
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def _split_of(file: Path) -> Split | None:
    """Return the split that the first word of the file's name, or of a parent folder's, names."""
    words = [word[0].lower() for part in (file.name, *file.parts[:-1]) if (word := _WORD.match(part))]
    splits: tuple[Split, ...] = ("train", "eval")
    return next((split for word in words for split in splits if word in _NAMES[split]), None)


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    from volley_supervised.conversations import tables

    for n, row in enumerate(tables.rows(file, COLUMNS, may_say)):
        yield f"{file}, row {n}", row
