"""Weights as numpy arrays, one at a time, out of files that are read once; the only importer of TensorStore.

The arrays of a checkpoint are decoded from memory, from the bytes whose digests were taken: between what was verified
and what is loaded there is no second look at the disk. In memory are then the files and one array, so the size of the
checkpoint once and a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
import tensorstore as ts

from shared.errors import WeightsError
from shared.files.reading import read_file
from shared.run.weights import ManifestFile, read_files, unreadable

_ARRAY = "/.zarray"
_SAFETENSORS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@dataclass(frozen=True, slots=True)
class CheckpointLeaf:
    """An array of a checkpoint; `read` makes it, whole as numpy whatever mesh of devices the trainer wrote it from, and
    raises WeightsError.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def open_checkpoint(folder: Path, below: str, files: Sequence[ManifestFile], version: str) -> dict[str, CheckpointLeaf]:
    """The leaves of the Orbax folder `below` a checkpoint's (OCDBT, Zarr 2), by flat name. The files have been read.

    Raises WeightsError if they are not those of the manifest or hold no arrays, and Unavailable if they cannot be read
    now.
    """
    context = ts.Context()  # its memory goes with the last leaf that is forgotten
    memory = ts.KvStore.open("memory://", context=context).result()
    for name, data in read_files(folder, below, files, version):
        memory.write(name, data).result()  # a copy
        del data
    database = {"driver": "ocdbt", "base": f"memory://{below}/"}
    try:
        keys = [key.decode() for key in ts.KvStore.open(database, context=context).result().list().result()]
        leaves = {key.removesuffix(_ARRAY): _open_leaf(database, key, context) for key in keys if key.endswith(_ARRAY)}
    except (ValueError, NotImplementedError, OverflowError) as error:
        raise _not_whole(version, error) from error
    if not leaves:
        raise WeightsError(f"{version} holds no arrays", "its files are not those of an Orbax checkpoint")
    return {name.removesuffix(".value"): leaf for name, leaf in leaves.items()}  # nnx wraps each leaf in a `value`


def open_hugging_face(folder: Path) -> dict[str, CheckpointLeaf]:
    """The tensors of all `.safetensors` files of a folder. Raises WeightsError, and Unavailable if they cannot be read
    now.
    """
    leaves: dict[str, CheckpointLeaf] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors = safetensors.deserialize(read_file(file, file.stat().st_size))
            for name, tensor in tensors:
                value = np.frombuffer(tensor["data"], _SAFETENSORS[tensor["dtype"]]).reshape(tensor["shape"])
                leaves[name] = CheckpointLeaf(value.shape, value.dtype, lambda value=value: value)
        except OSError as error:
            raise unreadable(str(file), error) from error
        except KeyError as error:
            raise WeightsError(f"{file} holds numbers of type {error}, none of {', '.join(_SAFETENSORS)}") from error
        except (safetensors.SafetensorError, ValueError) as error:
            raise WeightsError(f"{file} cannot be read: {_first_line(error)}") from error
    if not leaves:
        raise WeightsError(f"{folder} holds no .safetensors file with tensors")
    return leaves


def _open_leaf(database: dict[str, str], key: str, context: ts.Context) -> CheckpointLeaf:
    spec = {
        "driver": "zarr",
        "kvstore": {**database, "path": key.removesuffix(_ARRAY) + "/"},
        "fill_missing_data_reads": False,
    }
    array = ts.open(spec, context=context, open=True, read=True).result()

    def read() -> np.ndarray:
        try:
            return array.read().result()
        except ValueError as error:
            raise _not_whole(key, error) from error

    return CheckpointLeaf(tuple(array.shape), array.dtype.numpy_dtype, read)


def _not_whole(what: str, error: Exception) -> WeightsError:
    return WeightsError(f"{what} cannot be read as an Orbax checkpoint: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
