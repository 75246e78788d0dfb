"""Read weights as numpy arrays, one at a time, from files that are read once.

A checkpoint's files are hashed while they are copied into memory, and its arrays are decoded from these copies, so the
bytes that were verified are those that are loaded. Host memory then holds the checkpoint once, and at most two of its
arrays a second time.
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

from shared.errors import ConfigError, WeightsError
from shared.files.reading import confined, read_file
from shared.models.weight_files import SCALE, UNMERGED, weight_files
from shared.run import array_files
from shared.run.checkpoint_files import ManifestFile, copy_files, unreadable

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
    their copies live as long as the block. `check` is called while they are read, and raises an error to stop.

    Raises WeightsError if they are not those of the manifest or hold no arrays, Forbidden for a `below` outside the
    folder, Unavailable if they cannot be read now, and MemoryError if their copies do not fit.
    """
    below = str(confined(folder, below).relative_to(folder.resolve()))
    with _copied(folder, below, files, version, check) as copies:
        yield _leaves(copies / below, version)


class _MemoryFile(io.FileIO):
    """Unnamed file in this process's memory. A write stores everything or raises MemoryError."""

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
    raise MemoryError(f"not enough memory for a copy of the checkpoint: {error.strerror}") from error


@contextmanager
def _copied(
    folder: Path, below: str, files: Sequence[ManifestFile], version: str, check: Callable[[], None]
) -> Iterator[Path]:
    """Yield a folder of links to copies in this process's memory, which no other process can name."""
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


def _leaves(folder: Path, version: str) -> dict[str, CheckpointLeaf]:
    found = array_files.open_arrays(folder, version, file_io_mode={"mode": "memmap"})
    return {name.removesuffix(".value"): _leaf(name, array) for name, array in found.items()}  # nnx wraps each leaf


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
        for name, leaf in _tensors(file):
            if name in leaves:
                raise WeightsError(f"{file} has the tensor {name}, which an earlier file has too")
            leaves[name] = leaf
    if not leaves:
        raise WeightsError(f"{folder} has no .safetensors file with tensors")
    return leaves


def open_unmerged(folder: Path) -> tuple[dict[str, CheckpointLeaf], float] | None:
    """Return the adapters in a Hugging Face folder, by the trainer's names, and their scale; None if it has none.
    Raises as `open_hugging_face`.
    """
    file = folder / UNMERGED
    if not file.exists():
        return None
    leaves = dict(_tensors(file))
    scale = leaves.pop(SCALE, None)
    if scale is None or scale.shape:
        raise WeightsError(f"{file} has no number {SCALE}")
    return leaves, float(scale.read())


def _tensors(file: Path) -> Iterator[tuple[str, CheckpointLeaf]]:
    try:
        for name, tensor in safetensors.deserialize(read_file(file, file.stat().st_size)):
            value = np.frombuffer(tensor["data"], _SAFETENSORS[tensor["dtype"]]).reshape(tensor["shape"])
            yield name, CheckpointLeaf(value.shape, value.dtype, lambda value=value: value)
    except OSError as error:
        raise unreadable(str(file), error) from error
    except KeyError as error:
        raise WeightsError(f"{file} holds numbers of type {error}, none of {', '.join(_SAFETENSORS)}") from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read: {_first_line(error)}") from error


def _leaf(name: str, array: Any) -> CheckpointLeaf:
    def read() -> np.ndarray:
        try:
            return array.read().result()
        except ValueError as error:
            raise array_files.translated(name, error) from error

    return CheckpointLeaf(tuple(array.shape), array.dtype.numpy_dtype, read)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
