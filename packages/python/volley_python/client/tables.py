"""Rows as numpy arrays, or as tables of pandas and polars, which are imported when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, overload

import numpy as np

from shared.errors import ConfigError

type Row = Mapping[str, Any]


class Table(Sequence[Row]):
    """Rows with the same columns; a value that a row lacks is None."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice | list[str]) -> Table: ...
    def __getitem__(self, index: int | slice | list[str]) -> Row | Table:
        """Return a row, or the table of some rows, or that of the named columns."""
        if isinstance(index, list):
            return Table([{name: row.get(name) for name in index} for row in self._rows])
        return Table(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows)"

    def __str__(self) -> str:
        """Write the rows as aligned text, a line each, below the names of the columns."""
        cells = {name: [name, *map(_shown, values)] for name, values in self.columns().items()}
        widths = {name: max(map(len, column)) for name, column in cells.items()}
        lines = zip(*([cell.rjust(widths[name]) for cell in column] for name, column in cells.items()), strict=True)
        return "\n".join(map("  ".join, lines)) or repr(self)

    def columns(self) -> dict[str, list[Any]]:
        """Return the values of each column, in the order of the rows."""
        names = dict.fromkeys(name for row in self._rows for name in row)
        return {name: [row.get(name) for row in self._rows] for name in names}

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Return an array [N] for each column: bool, int64, float64 (NaN where a row has no number), or object."""
        return {name: _array(values) for name, values in self.columns().items()}

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`. Raises ConfigError if pandas is not installed."""
        return library("pandas").DataFrame(self.columns())

    def to_polars(self) -> Any:
        """Return a `polars.DataFrame`. Raises ConfigError if polars is not installed."""
        return library("polars").DataFrame(self.columns(), strict=False)


def missing(package: str, purpose: str) -> ConfigError:
    """Return the error of a package for tables that is not installed."""
    return ConfigError(
        f"{purpose} need the package {package}, which is not installed",
        f"install it with `pip install {package}`",
    )


def library(name: str) -> Any:
    """Import a package of the extra `tables`. Raises ConfigError that names it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise missing(name, "such tables") from error


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _array(values: Sequence[Any]) -> np.ndarray:
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return np.array(values, bool)
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in values):
        return np.array(values, np.int64)
    if kinds and kinds <= {int, float, type(None)} and kinds != {type(None)}:
        return np.array([np.nan if value is None else value for value in values], np.float64)
    made = np.empty(len(values), object)
    made[:] = values
    return made
