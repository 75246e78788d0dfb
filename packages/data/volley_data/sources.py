"""Data that a user names: a file, a folder of files or of `datasets`, or a hub id; each has splits."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from shared.errors import ConfigError
from volley_data.data_files import rows
from volley_data.tables import from_reader

type Rows = Iterator[tuple[str, Any]]
"""(place, value) of every row."""
TRAIN, HELD_OUT = "train", ("eval", "validation", "valid", "dev", "test")
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".gz", ".csv", ".tsv", ".parquet", ".arrow")
_HUB = re.compile(r"[\w.-]+/[\w.-]+(?::(?P<config>[\w.-]+))?")
_HUB_URL, _HUB_S = "https://huggingface.co", 5.0
"""Address of the hub, unless HF_ENDPOINT names another, and seconds to wait for a connection."""
_FORMATS = "JSONL, JSON, CSV, Parquet, a folder that datasets saved, or a hub id such as openai/gsm8k:main"


@dataclass(frozen=True, slots=True)
class DataSource:
    """Data by split. A single file has one split, `train`."""

    shown: str
    splits: Mapping[str, Callable[[], Rows]]

    def of(self, split: str) -> Rows:
        """Rows of a split. Raises ConfigError."""
        if split not in self.splits:
            near = get_close_matches(split, self.splits, n=1)
            known = ", ".join(self.splits)
            raise ConfigError(
                f"{self.shown} has no split {split}", f"did you mean {near[0]}?" if near else f"it has: {known}"
            )
        return self.splits[split]()

    @property
    def train(self) -> str:
        """The split to train on. Raises ConfigError if there is no obvious one."""
        if TRAIN in self.splits or len(self.splits) != 1:
            return TRAIN
        return next(iter(self.splits))

    @property
    def held_out(self) -> str | None:
        """The split that is held out unless another is named."""
        return next((split for split in HELD_OUT if split in self.splits and split != self.train), None)


def find(data: str) -> DataSource:
    """Find the data. Raises ConfigError if it is neither there nor a hub id."""
    path = Path(data).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.exists():
        return DataSource(data, {TRAIN: partial(rows, path)})
    match = _HUB.fullmatch(data)
    if match is None or data.startswith(("./", "../")) or path.suffix.lower() in _SUFFIXES or path.parent.is_dir():
        raise ConfigError(f"{data}: there is no such file or folder", f"give {_FORMATS}")
    return _hub(data, match["config"] or "")


def _folder(folder: Path) -> DataSource:
    """A folder that `datasets` saved, or with a file for each split. Raises ConfigError."""
    if parts := {one.name: _saved(one) for one in sorted(folder.iterdir()) if (one / "state.json").is_file()}:
        return DataSource(str(folder), {split: partial(_all, files) for split, files in parts.items()})
    if (folder / "state.json").is_file():
        return DataSource(str(folder), {TRAIN: partial(_all, _saved(folder))})
    files = [one for one in sorted(folder.iterdir()) if one.suffix.lower() in _SUFFIXES and one.is_file()]
    named = dict[str, list[Path]]()
    for file in files:
        split = re.split(r"[^a-z]", file.name.lower())[0]
        named.setdefault(split if split in (TRAIN, *HELD_OUT) else TRAIN, []).append(file)
    if not named:
        raise ConfigError(f"{folder} holds no data", f"give {_FORMATS}")
    return DataSource(str(folder), {split: partial(_all, found) for split, found in named.items()})


def _saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.arrow"))


def _all(files: list[Path]) -> Rows:
    for file in files:
        yield from rows(file)


def _hub(data: str, config: str) -> DataSource:
    """A data set of the hub, read by `datasets`. Raises ConfigError if the hub cannot be reached."""
    name = data.partition(":")[0]
    if (why := _silent()) is not None:
        raise _unreachable(data, why)
    try:
        splits: list[str] = next(from_reader(data, "splits", name, config))
    except ConfigError as error:
        raise _unreachable(data, error.detail.partition(": ")[2]) from error

    def of(split: str) -> Rows:
        for n, row in enumerate(from_reader(data, "hub", name, config, split), 1):
            yield f"{data}, {split}, row {n}", row

    return DataSource(data, {split: partial(of, split) for split in splits})


def _silent() -> str | None:
    """Say why the hub cannot answer; None if it may. `datasets` itself would try for half a minute."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return "HF_HUB_OFFLINE is set"
    where = urlsplit(os.environ.get("HF_ENDPOINT") or _HUB_URL)
    if getproxies() or where.hostname is None:
        return None
    try:
        socket.create_connection(
            (where.hostname, where.port or (80 if where.scheme == "http" else 443)), _HUB_S
        ).close()
    except OSError as error:
        return f"{where.netloc} does not answer ({error.strerror or error})"
    return None


def _unreachable(data: str, why: str) -> ConfigError:
    return ConfigError(
        f"{data} is no file or folder here, and the hub does not give it: {why}",
        'where there is a network: python -c "from datasets import load_dataset; '
        f"load_dataset('{data.partition(':')[0]}').save_to_disk('FOLDER')\", and then --data FOLDER",
    )
