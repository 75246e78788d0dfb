"""Files of exported episodes: JSON lines, or Parquet with pyarrow.

A file appears whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Self

import orjson

from shared.errors import ConfigError, StorageFull
from shared.files.storage import storage
from volley_python.client.tables import missing

SUFFIXES = (".jsonl", ".parquet")
_MOST_ROWS, _MOST_CHARACTERS = 1024, 2**24
"""Largest group of rows in a Parquet file."""
_MAPS = ("components", "faults", "failures")

type Record = Mapping[str, Any]
"""An episode as `volley_dashboard.trajectories.episodes.record_of` describes it."""


def has_parquet() -> bool:
    """Return True if Parquet files can be written here."""
    return find_spec("pyarrow") is not None


def check(path: Path) -> None:
    """Check that `path` can be exported to. Raises ConfigError."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is neither .jsonl nor .parquet", "name a file such as episodes.jsonl")
    if path.suffix == ".parquet" and not has_parquet():
        raise missing("pyarrow", "Parquet files")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be made: its folder is missing", "create the folder, or name another file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} exists and is no regular file, so it is not replaced", "name another file")


def write(path: Path, records: Iterable[Record]) -> int:
    """Write the records to a new file, which replaces an existing one; return their number.

    Raises ConfigError as `check`, StorageFull, StorageDenied, and what `records` raises; then nothing is left.
    """
    check(path)
    draft, n = path.with_name(f".{path.name}.{os.getpid()}.tmp"), 0
    try:
        with storage(path.absolute().parent):
            with draft.open("xb") as file, writer(path.suffix, file) as add:
                for record in records:
                    add(record)
                    n += 1
            draft.replace(path)
    except StorageFull as error:
        raise StorageFull(f"{path} was not written: {error.hint}", "make room, or name a file elsewhere") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return n


@contextmanager
def writer(suffix: str, file: IO[bytes]) -> Iterator[Callable[[Record], object]]:
    """Open a function that writes records to `file` in the format of the suffix."""
    if suffix == ".jsonl":
        yield lambda record: file.write(line(record))
        return
    with _ParquetRows(file) as rows:
        yield rows.add


def line(record: Record) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


class _ParquetRows:
    """Rows of a Parquet file, written in groups."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._waiting, self._size = file, list[Record](), 0
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._write()
        if self._writer is not None:
            with suppress(Exception) if error is not None else nullcontext():  # the file is given up
                self._writer.close()

    def add(self, record: Record) -> None:
        self._waiting.append({**record, **{key: list(record[key].items()) for key in _MAPS}})
        self._size += sum(len(turn["text"]) for turn in record["turns"]) + 1
        if len(self._waiting) >= _MOST_ROWS or self._size >= _MOST_CHARACTERS:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._writer is None:
            has_tokens = bool(self._waiting) and "sequences" in self._waiting[0]
            self._writer = pq.ParquetWriter(self._file, _schema(pa, tokens=has_tokens), compression="zstd")
        self._writer.write_table(pa.Table.from_pylist(self._waiting, schema=self._writer.schema))
        self._waiting, self._size = [], 0


def _schema(pa: Any, *, tokens: bool) -> Any:
    counts, turn = pa.map_(pa.string(), pa.int64()), [("role", pa.string()), ("text", pa.string())]
    fields = [
        *(("ticket", pa.int64()), ("sample", pa.int64()), ("attempt", pa.int64()), ("env", pa.string())),
        *(("task", pa.string()), ("version", pa.string()), ("step", pa.int64()), ("reward", pa.float64())),
        *(("success", pa.bool_()), ("status", pa.string()), ("end", pa.string())),
        *(("components", pa.map_(pa.string(), pa.float64())), ("faults", counts), ("failures", counts)),
        ("turns", pa.list_(pa.struct([*turn, ("reward", pa.float64()), ("sequence", pa.int64())]))),
    ]
    arrays = [("token_ids", pa.int32()), ("loss_mask", pa.uint8()), ("logprobs", pa.float32())]
    if tokens:
        parts = [("parent", pa.int64()), ("shared", pa.int64()), *((name, pa.list_(kind)) for name, kind in arrays)]
        fields.append(("sequences", pa.list_(pa.struct(parts))))
    return pa.schema(fields)
