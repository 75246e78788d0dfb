"""Rows of Parquet and Arrow files. Only this module imports pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shared.errors import ConfigError
from shared.files.reading import open_file

_ROWS = 512
_ARROW_FILE = b"ARROW1"
"""Beginning of Arrow's file format, which is also Feather's; what does not begin so is its stream format."""
_UNREADABLE = (pa.ArrowException, ValueError, OverflowError)


def rows(file: Path, columns: Collection[str], is_read: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """Yield rows as JSON would hold them: `columns` and columns whose name `is_read`; others are null.

    An Arrow struct has the fields of all rows; null ones are omitted.

    Raises ConfigError that names the file, and the row of a value that Python cannot represent: text that is not UTF-8,
    a date after Python's last one.
    """
    try:
        with open_file(file) as opened:
            n, (schema, batches) = 0, _batches(file, opened)
            found = _columns_to_read(file, schema, columns, is_read)
            unread = dict.fromkeys(name for name in schema.names if name not in found)
            for batch in batches(found):
                for row in _values(batch, f"{file}, row", n):
                    yield unread | _present(row)
                n += batch.num_rows
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}", "give an existing file") from error
    except _UNREADABLE as error:
        raise ConfigError(f"{file} cannot be read: {_first_line(error)}", "check that the file is complete") from error


def _batches(file: Path, opened: Any) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    """Return the schema, and a function from names of columns to their batches."""
    if file.suffix == ".parquet":
        whole = pq.ParquetFile(opened)
        return whole.schema_arrow, lambda names: whole.iter_batches(_ROWS, columns=names)
    is_file = opened.read(len(_ARROW_FILE)) == _ARROW_FILE
    opened.seek(0)
    if not is_file:
        stream = pa.ipc.open_stream(opened)
        return stream.schema, lambda names: (batch.select(names) for batch in stream)
    whole = pa.ipc.open_file(opened)
    found = (whole.get_batch(i) for i in range(whole.num_record_batches))
    return whole.schema, lambda names: (batch.select(names) for batch in found)


def _columns_to_read(file: Path, schema: Any, columns: Collection[str], is_read: Callable[[str], bool]) -> list[str]:
    if not any(name in columns for name in schema.names):
        there = ", ".join(schema.names[:8]) or "no column"
        raise ConfigError(f"{file} holds no conversation: it has {there}", f"use the columns {', '.join(columns)}")
    return [name for name in schema.names if name in columns or is_read(name)]


def _values(batch: Any, place: str, first: int) -> list[dict[str, Any]]:
    """Convert a batch to rows. Raises ConfigError that names the first invalid row, counted from `first`."""
    try:
        return batch.to_pylist()
    except _UNREADABLE:
        for i in range(batch.num_rows):
            try:
                batch.slice(i, 1).to_pylist()
            except _UNREADABLE as error:
                why = f"{place} {first + i} cannot be read: {_first_line(error)}"
                raise ConfigError(why, "store text as UTF-8") from error
        raise


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(inner) for key, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value
