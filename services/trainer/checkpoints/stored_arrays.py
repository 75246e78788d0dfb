"""Arrays of an Orbax folder that are read when they are used, and only the part that is asked for: `array[index]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shared.run import array_files


class StoredArray:
    """One of them; `numpy.asarray` reads it whole. Reading raises WeightsError, and Unavailable if it cannot be read
    now. `chunk_rows` is how many rows lie together.
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
    """All of a folder, by flat name. Raises as reading does, and WeightsError for arrays that no trainer writes."""
    return {name: StoredArray(folder, array) for name, array in array_files.open_arrays(folder).items()}
