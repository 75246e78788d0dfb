"""Open the arrays of an Orbax folder (Zarr 2 in an OCDBT database) if a trainer can have written them.

TensorStore trusts the metadata of an array: a chunk may be far larger than its array, and a few compressed bytes may
decompress to gigabytes. A trainer compresses nothing and makes no chunk larger than its array, so the files hold every
byte of the arrays; anything else is refused before a chunk is read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import tensorstore as ts

from shared.errors import VolleyError, WeightsError
from shared.run.checkpoint_files import unreadable

_METADATA = "/.zarray"
_MAX_ARRAYS, _MAX_METADATA_BYTES, _MAX_RANK = 100_000, 2**16, 32
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'")


def open_arrays(folder: Path, what: str | None = None, **options: Any) -> dict[str, ts.TensorStore]:
    """Open all arrays of a folder, by flat name, for any sharding and JAX version.

    Raises WeightsError if the folder holds no arrays, or arrays that no trainer writes, and Unavailable if they cannot
    be read now.

    Args:
        what: the folder's name in errors.
        options: of TensorStore's file driver.
    """
    what = what or str(folder)
    path = f"{folder.resolve()}/"  # TensorStore refuses `..`
    database = {"driver": "ocdbt", "base": {"driver": "file", "path": path, **options}}
    context, found = ts.Context(), dict[str, ts.TensorStore]()
    try:
        n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        store = ts.KvStore.open(database, context=context).result()
        names = [key[: -len(_METADATA)].decode() for key in store.list().result() if key.endswith(_METADATA.encode())]
        if len(names) > _MAX_ARRAYS:
            raise WeightsError(f"{what} holds {len(names)} arrays, more than {_MAX_ARRAYS}")
        for name in names:
            _check(name, store.read(name + _METADATA).result().value, n_bytes)
            spec = {"driver": "zarr", "kvstore": {**database, "path": f"{name}/"}, "fill_missing_data_reads": False}
            found[name] = ts.open(spec, context=context, open=True, read=True).result()
    except OSError as error:
        raise unreadable(what, error) from error
    except (ValueError, NotImplementedError, OverflowError) as error:
        raise translated(what, error) from error
    if not found:
        raise WeightsError(f"{what} holds no arrays", "the folder is not an Orbax checkpoint")
    if (n := sum(math.prod(one.shape) * one.dtype.numpy_dtype.itemsize for one in found.values())) > n_bytes:
        raise WeightsError(f"{what}: its arrays need {n} bytes, but its files have {n_bytes}")
    return found


def _check(name: str, metadata: bytes, n_bytes: int) -> None:
    """Raise WeightsError or ValueError unless an array is uncompressed, in chunks no larger than itself."""
    if len(metadata) > _MAX_METADATA_BYTES:
        raise ValueError(f"the metadata of {name[:100]} has {len(metadata)} bytes")
    raw = orjson.loads(metadata)
    if not isinstance(raw, dict):
        raise ValueError(f"the metadata of {name[:100]} is not an object")
    shape, chunks = _sizes(raw, "shape"), _sizes(raw, "chunks")
    if not len(shape) == len(chunks) <= _MAX_RANK:
        raise WeightsError(f"{name[:100]} has {len(shape)} axes, and chunks of {len(chunks)}")
    if any(not 0 < chunk <= max(1, size) for chunk, size in zip(chunks, shape, strict=True)):
        raise WeightsError(f"{name[:100]} has chunks of {str(chunks)[:60]}, larger than its shape {str(shape)[:60]}")
    if math.prod(chunks) > n_bytes:
        raise WeightsError(f"{name[:100]} has chunks of {str(chunks)[:60]}, more than the {n_bytes} bytes of the files")
    for key in ("compressor", "filters"):
        if raw.get(key) is not None:
            raise WeightsError(f"{name[:100]} has the {key} {str(raw[key])[:60]}; trainers never compress arrays")


def _sizes(raw: Mapping[str, Any], key: str) -> list[int]:
    """Return a list of sizes. Raises ValueError."""
    value = raw.get(key)
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{key} is {str(value)[:60]}, not a list of sizes")
    return value


def translated(what: str, error: Exception) -> VolleyError:
    """Translate the error of a library that could not read `what`."""
    if (cause := os_error(error)) is not None:
        return unreadable(what, cause)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return WeightsError(f"{what} cannot be read as an Orbax checkpoint: {reason[:300]}")


def os_error(error: Exception) -> OSError | None:
    """Return the OSError in a TensorStore error's text (`… [os_error_code='28']`); None without one."""
    code = _OS_ERROR.search(str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else None
