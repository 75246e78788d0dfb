"""Rows of CSV, Parquet and Arrow, beside the JSON lines that `volley_data.data_files` reads.

pyarrow and `datasets` are in the trainer's environment; a process there prints the rows, one batch at a time.
"""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ConfigError
from volley.layout import python_of
from volley_data.byte_order import MAX_LINE_BYTES, mark_of

_READER = Path(__file__).with_name("table_reader.py")
_SEPARATORS = {".csv": ",;\t|", ".tsv": "\t"}
"""Separators by suffix: the first that the first line holds."""
_INT, _FLOAT = re.compile(r"-?(0|[1-9][0-9]{0,17})"), re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def rows(file: Path, hint: str = "give an existing file") -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of every row of a table. Raises ConfigError naming the file, and the row."""
    if (separators := _SEPARATORS.get(file.suffix.lower())) is not None:
        yield from _delimited(file, separators, hint)
        return
    for n, row in enumerate(from_reader(str(file), "file", str(file)), 1):
        yield f"{file}, row {n}", row


def from_reader(shown: str, *arguments: str) -> Iterator[Any]:
    """Yield the JSON lines of `table_reader.py`. Raises ConfigError with its error."""
    command = [str(python_of("trainer")), str(_READER), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            yield from map(orjson.loads, process.stdout)
        except GeneratorExit:
            process.kill()
            raise
        told = process.stderr.read().decode(errors="replace").strip().splitlines()
        if process.wait() != 0:
            raise ConfigError(
                f"{shown} cannot be read: {told[-1] if told else 'its reader ended early'}", "is it whole?"
            )


def _delimited(file: Path, separators: str, hint: str) -> Iterator[tuple[str, Any]]:
    """Rows of a CSV file. A column is of numbers if all its fields are; an empty one of them is null."""
    kinds = _kinds(file, separators, hint)
    if not kinds:
        problem = "has no rows below its first line" if file.stat().st_size else "is empty"
        raise ConfigError(f"{file} {problem}", "its first line names the columns, each further one is a row")
    for place, row in _fields(file, separators, hint):
        yield place, {name: _value(row[name], kind) for name, kind in kinds.items()}


def _kinds(file: Path, separators: str, hint: str) -> Mapping[str, type]:
    """Type of each column: int, float or str."""
    kinds, filled = dict[str, type](), set[str]()
    for _, row in _fields(file, separators, hint):
        for name, field in row.items():
            kind = kinds.setdefault(name, int)
            if field:
                filled.add(name)
                if kind is int and not _INT.fullmatch(field):
                    kinds[name] = kind = float
                if kind is float and not _FLOAT.fullmatch(field):
                    kinds[name] = str
    return {name: kind if name in filled else str for name, kind in kinds.items()}


def _value(field: str, kind: type) -> Any:
    return field if kind is str else kind(field) if field else None


def _fields(file: Path, separators: str, hint: str) -> Iterator[tuple[str, dict[str, str]]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    try:
        with file.open("rb") as raw:
            mark, encoding = mark_of(raw.read(4))
        with file.open(encoding=encoding, newline="") as opened:
            opened.seek(len(mark))
            head = opened.readline()
            opened.seek(len(mark))
            separator = next((one for one in separators if one in head), separators[0])
            reader = csv.reader(opened, delimiter=separator, strict=True)
            names = [name.strip() for name in next(reader, [])]
            if wrong := [name for n, name in enumerate(names) if not name or name in names[:n]]:
                problem = f"names the column {wrong[0]} twice" if wrong[0] else "has a column without a name"
                raise ConfigError(f"{file}, line 1, {problem}", "the first line names the columns")
            for row in reader:
                if not row:
                    continue
                place = f"{file}, line {reader.line_num}"
                if len(row) != len(names):
                    raise ConfigError(
                        f"{place} has {len(row)} fields, and the first line names {len(names)} columns",
                        'put fields with commas, quotes or line breaks in double quotes, and write a quote as ""',
                    )
                yield place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{file} is no CSV: {error}", "put fields with line breaks in double quotes") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} cannot be read as text: {error.reason}", "save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"data file {file}: {error.strerror or error}", hint) from error
