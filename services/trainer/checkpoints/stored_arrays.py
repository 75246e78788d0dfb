"""Arrays of an Orbax folder (OCDBT, Zarr 2) that are read when they are used, and only the part that is asked for:
`array[index]`. The one module of the trainer that knows TensorStore.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from shared.errors import VolleyError, WeightsError
from shared.run.weights import unreadable

_ARRAY = "/.zarray"
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'")


class StoredArray:
    """One of them; `numpy.asarray` reads it whole. Reading raises WeightsError, and Unavailable if it cannot be read
    now.
    """

    def __init__(self, folder: Path, array: ts.TensorStore) -> None:
        self._folder, self._array = folder, array
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype = np.dtype(array.dtype.numpy_dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        try:
            return self._array[index].read().result()
        except ValueError as error:
            raise _unreadable(self._folder, error) from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self[...]
        return found if dtype is None else found.astype(dtype, copy=False)


def open_arrays(folder: Path) -> dict[str, StoredArray]:
    """All of a folder, by flat name, whatever sharding and JAX wrote them. Raises as reading does."""
    base, context = {"driver": "file", "path": f"{folder}/"}, ts.Context()
    database = {"driver": "ocdbt", "base": base}
    try:
        keys = [key.decode() for key in ts.KvStore.open(database, context=context).result().list().result()]
        found = {
            key.removesuffix(_ARRAY): StoredArray(folder, _opened(database, key, context))
            for key in keys
            if key.endswith(_ARRAY)
        }
    except (ValueError, NotImplementedError, OverflowError) as error:
        raise _unreadable(folder, error) from error
    if not found:
        raise WeightsError(f"{folder} holds no arrays", "its files are not those of an Orbax checkpoint")
    return found


def os_error(error: Exception) -> OSError | None:
    """What the system said, which TensorStore tells in its text alone: `RESOURCE_EXHAUSTED: … No space left on device
    [os_error_code='28']`.
    """
    code = _OS_ERROR.search(str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else None


def _opened(database: dict[str, Any], key: str, context: ts.Context) -> ts.TensorStore:
    kvstore = {**database, "path": key.removesuffix(_ARRAY) + "/"}
    spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
    return ts.open(spec, context=context, open=True, read=True).result()


def _unreadable(folder: Path, error: Exception) -> VolleyError:
    if (cause := os_error(error)) is not None:
        return unreadable(str(folder), cause)
    said = (str(error).splitlines() or [type(error).__name__])[0]
    return WeightsError(f"{folder} cannot be restored: {said[:300]}")
