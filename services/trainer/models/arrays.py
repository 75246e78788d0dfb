"""What a checkpoint holds, in memory and as it was restored, and the seam to how arrays become files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared.run.checkpoint_files import Adapter, Probe
from shared.run.checksums import Checksums
from shared.run.state import TrainerState


class Array(Protocol):
    """Of numpy, or of JAX on its devices."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


type Arrays = Mapping[str, Array]
type HostArray = Any
"""Of numpy, or an array with `shape` and `dtype` that lies in a file: `[index]` reads that part, numpy.asarray all."""


class ArrayFiles(Protocol):
    """Writes named arrays below a folder that does not exist yet, and reads them back."""

    def write(self, folder: Path, arrays: Arrays) -> None: ...

    def read(self, folder: Path) -> dict[str, HostArray]:
        """Raises WeightsError if the folder does not hold arrays, Unavailable, and OSError."""
        ...

    def checksums(self, folder: Path) -> Checksums:
        """Of a whole checkpoint, as the log tells them; empty where they are of another kind. Raises as `read`."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """`params` as published; `optimizer` by name; `master` are the float32 parameters if `params` are not,
    else None. With an `adapter`, `params` are those of adapters.
    """

    params: Arrays
    optimizer: Arrays
    master: Arrays | None
    model: Mapping[str, Any]
    probe: Probe | None
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """A checkpoint; `params` are float32, with an `adapter` those of adapters."""

    folder: Path
    state: TrainerState
    params: Mapping[str, HostArray]
    optimizer: Mapping[str, HostArray]
    adapter: Adapter | None = None
