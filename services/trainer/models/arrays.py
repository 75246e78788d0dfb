"""Contents of a checkpoint, in memory and restored, and the Protocol that writes and reads its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared.run.checkpoint_files import Adapter, Probe
from shared.run.state import TrainerState


class Array(Protocol):
    """Array of numpy, or of JAX on its devices."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


type Arrays = Mapping[str, Array]
type HostArray = Any
"""Array of numpy, or an array in a file with `shape` and `dtype`: `[index]` reads that part, numpy.asarray all."""


class ArrayFiles(Protocol):
    """Writer and reader of named arrays in a folder; `write` makes the folder."""

    def write(self, folder: Path, arrays: Arrays) -> None: ...

    def read(self, folder: Path) -> dict[str, HostArray]:
        """Raises WeightsError if the folder does not hold arrays, Unavailable, and OSError."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """Checkpoint to write.

    Attributes:
        params: as published; with an `adapter` those of adapters.
        optimizer: state by name.
        master: float32 parameters if `params` have another dtype, else None.
    """

    params: Arrays
    optimizer: Arrays
    master: Arrays | None
    model: Mapping[str, Any]
    probe: Probe | None
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """Checkpoint as read; `params` are float32, with an `adapter` those of adapters."""

    folder: Path
    state: TrainerState
    params: Mapping[str, HostArray]
    optimizer: Mapping[str, HostArray]
    adapter: Adapter | None = None
