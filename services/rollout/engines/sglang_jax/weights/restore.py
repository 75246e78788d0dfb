"""Weights as numpy arrays, one at a time, out of files that are read once; the only importer of TensorStore.

A checkpoint's files are copied into memory while their digests are taken, and its arrays are decoded from these copies:
between what was verified and what is loaded there is no second look at the disk. Host memory then holds the checkpoint
once, and two arrays of it again at most.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

import ml_dtypes
import numpy as np
import safetensors
import tensorstore as ts

from shared.errors import ConfigError, WeightsError
from shared.files.reading import read_file
from shared.models.weight_files import weight_files
from shared.run.weights import ManifestFile, confined, copy_files, unreadable

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


@contextmanager
def open_checkpoint(
    folder: Path,
    below: str,
    files: Sequence[ManifestFile],
    version: str,
    check: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, CheckpointLeaf]]:
    """The leaves of the Orbax folder `below` a checkpoint's (OCDBT, Zarr 2), by flat name. The files have been read;
    their copies live as long as the block. `check` is called while they are read, and raises what is to end that.

    Raises WeightsError if they are not those of the manifest or hold no arrays, Forbidden for a `below` outside the
    folder, Unavailable if they cannot be read now, and MemoryError if their copies do not fit.
    """
    below = str(confined(folder, below).relative_to(folder.resolve()))
    with _copied(folder, below, files, version, check) as copies:
        base = {"driver": "file", "path": f"{copies / below}/", "file_io_mode": {"mode": "memmap"}}
        yield _leaves({"driver": "ocdbt", "base": base}, version)


class _MemoryFile(io.FileIO):
    """A file without a name, in this process's memory; it takes all that is written, or raises MemoryError."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__(os.memfd_create("volley-weights"), "wb")
        self._check = check

    def write(self, data: Any) -> int:
        self._check()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[super().write(rest) :]
        except OSError as error:
            _does_not_fit(error)
        return len(data)


def _does_not_fit(error: OSError) -> Never:
    raise MemoryError(f"a copy of the checkpoint cannot be held: {error.strerror}") from error


@contextmanager
def _copied(
    folder: Path, below: str, files: Sequence[ManifestFile], version: str, check: Callable[[], None]
) -> Iterator[Path]:
    """A folder of links to copies in this process's memory, which nobody else has a name for."""
    with ExitStack() as stack:
        links = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="volley-weights-")))

        def copy(name: str) -> _MemoryFile:
            try:
                file = stack.enter_context(_MemoryFile(check))
                (links / name).parent.mkdir(parents=True, exist_ok=True)
                (links / name).symlink_to(f"/proc/self/fd/{file.fileno()}")
            except OSError as error:
                _does_not_fit(error)
            return file

        copy_files(folder, below, files, version, copy)
        yield links


def _leaves(database: dict[str, Any], version: str) -> dict[str, CheckpointLeaf]:
    context = ts.Context()
    try:
        keys = [key.decode() for key in ts.KvStore.open(database, context=context).result().list().result()]
        leaves = {key.removesuffix(_ARRAY): _open_leaf(database, key, context) for key in keys if key.endswith(_ARRAY)}
    except (ValueError, NotImplementedError, OverflowError) as error:
        raise _not_whole(version, error) from error
    if not leaves:
        raise WeightsError(f"{version} holds no arrays", "its files are not those of an Orbax checkpoint")
    return {name.removesuffix(".value"): leaf for name, leaf in leaves.items()}  # nnx wraps each leaf in a `value`


def open_hugging_face(folder: Path) -> dict[str, CheckpointLeaf]:
    """The tensors that transformers would read of a folder. Raises WeightsError, and Unavailable if they cannot be
    read now.
    """
    leaves: dict[str, CheckpointLeaf] = {}
    try:
        files = weight_files(folder)
    except ConfigError as error:
        raise WeightsError(error.detail, error.hint) from error
    for file in files:
        try:
            tensors = safetensors.deserialize(read_file(file, file.stat().st_size))
            for name, tensor in tensors:
                if name in leaves:
                    raise WeightsError(f"{file} holds the tensor {name}, and so does a file before it")
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


def _open_leaf(database: dict[str, Any], key: str, context: ts.Context) -> CheckpointLeaf:
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
