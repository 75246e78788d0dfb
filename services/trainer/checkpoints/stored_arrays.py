"""Lazy arrays of an Orbax folder: `array[index]` reads only that part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shared.run import array_files


class StoredArray:
    """A lazy array; `numpy.asarray` reads it whole. `chunk_rows` is the number of rows in a chunk of its file.

    Reading raises WeightsError, and Unavailable if it cannot be read now.
    """

    def __init__(self, folder: Path, array: Any) -> None:
        self._folder, self._array = folder, array
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype = np.dtype(array.dtype.numpy_dtype)
        self.chunk_rows: int = array.chunk_layout.read_chunk.shape[0] if self.shape else 1

    def __getitem__(self, index: Any) -> np.ndarray:
        try:
            return self._array[index].read().result()
        except ValueError as error:
            raise array_files.translated(str(self._folder), error) from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self[...]
        return found if dtype is None else found.astype(dtype, copy=False)


def open_arrays(folder: Path) -> dict[str, StoredArray]:
    """Open all arrays of a folder, by flat name. Raises as reading, and WeightsError for arrays of no trainer."""
    return {name: StoredArray(folder, array) for name, array in array_files.open_arrays(folder).items()}
