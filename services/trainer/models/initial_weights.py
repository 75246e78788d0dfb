"""Where initial weights come from: safetensors files, or a seeded generator when the folder has none. No JAX here.

Invariant: one leaf at a time is in host memory, and of files only the part of it that is asked for, so a model larger
than half the host's memory still loads.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from services.trainer.checkpoints.contents import HostArray
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.names import from_hf, hf_name, in_files, is_experts

type Leaves = Callable[[str, tuple[int, ...]], HostArray]

_LENGTH = 8
_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_RESIDUAL = (".attn.o_proj.w", ".mlp.down_proj.kernel", ".mlp.down_proj")


def leaves_of(folder: Path, model: ModelConfig, seed: int) -> Leaves:
    """The folder's safetensors if it has any, else random weights of `seed`."""
    files = sorted(folder.glob("*.safetensors"))
    return safetensors_leaves(folder, files) if files else random_leaves(model, seed)


def random_leaves(model: ModelConfig, seed: int) -> Leaves:
    """Normal weights with the config's initializer_range; projections onto the residual stream are scaled by 1/sqrt(2
    L), biases are 0 and norms those that change nothing: 1, or 0 where they multiply by 1 + weight.

    Every leaf has a generator of its own, seeded by its name, so values depend on neither order nor sharding.
    """

    def leaf(name: str, size: tuple[int, ...]) -> np.ndarray:
        if name.endswith("norm.w"):
            return np.full(size, 0.0 if model.gemma2 else 1.0, np.float32)
        if name.endswith("_bias"):
            return np.zeros(size, np.float32)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        scale = model.initializer_range
        if name.endswith(_RESIDUAL):
            scale /= math.sqrt(2 * model.num_hidden_layers)
        return rng.standard_normal(size, np.float32) * np.float32(scale)

    return leaf


def safetensors_leaves(folder: Path, files: list[Path]) -> Leaves:
    """Leaves read from one or several safetensors files. Raises ConfigError naming a missing or misshapen tensor."""
    where = _index(folder, files)

    def tensor(name: str, called: str, size: tuple[int, ...]) -> FileTensor:
        source = where.get(called)
        if source is None:
            raise ConfigError(
                f"model folder {folder} lacks the tensor {called}",
                "is it complete, and of the family that config.json names?",
            )
        try:
            return FileTensor(from_hf(name, source.mapped(), size))
        except (ValueError, OSError) as error:
            raise ConfigError(f"model file {source.file}: {error}") from error

    def leaf(name: str, size: tuple[int, ...]) -> HostArray:
        called = hf_name(name)
        if not is_experts(name):
            return tensor(name, called, size)
        return StackedTensors([tensor(name, one, size[1:]) for one in in_files(called, size[0])])

    return leaf


class FileTensor:
    """A tensor of a file, as a leaf: `[index]` reads that part, numpy.asarray all."""

    def __init__(self, mapped: np.ndarray) -> None:
        self._mapped, self.shape, self.dtype = mapped, mapped.shape, mapped.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.array(self._mapped[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._mapped, dtype)


class StackedTensors:
    """Tensors of one shape and dtype as a leaf with an axis more in front: of those that are asked for, that part is
    read.
    """

    def __init__(self, parts: list[FileTensor]) -> None:
        self._parts, self.shape, self.dtype = parts, (len(parts), *parts[0].shape), parts[0].dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *rest = index if isinstance(index, tuple) else (index,)
        return np.stack([part[tuple(rest)] for part in self._parts[first]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack([np.asarray(part, dtype) for part in self._parts])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: `offset` in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def mapped(self) -> np.ndarray:
        """Raises ValueError for numbers of another kind, OSError."""
        if self.dtype not in _DTYPES:
            raise ValueError(f"numbers of type {self.dtype}, none of {', '.join(_DTYPES)}")
        return np.memmap(self.file, _DTYPES[self.dtype], "r", self.offset, self.shape)


def _index(folder: Path, files: list[Path]) -> dict[str, _Place]:
    """Tensor name -> where it lies. An index file that names an absent shard is an incomplete download."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            named = {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"model file {index} is no index of tensors: {error!r}", "the download is incomplete or damaged"
            ) from error
        absent = sorted(path.name for path in named if not path.exists())
        if absent:
            raise ConfigError(f"model folder {folder} lacks {', '.join(absent)}", "the download is incomplete")
    where: dict[str, _Place] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as tensors:  # which looks at offsets and sizes
                names = set(tensors.keys())
            where |= {name: place for name, place in _places(file) if name in names}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model file {file} cannot be read: {error}") from error
    return where


def _places(file: Path) -> Iterator[tuple[str, _Place]]:
    """As its header says: eight bytes of length, then JSON."""
    with file.open("rb") as data:
        n = int.from_bytes(data.read(_LENGTH), "little")
        header = json.loads(data.read(n))
    for name, said in header.items():
        if name != "__metadata__":
            yield name, _Place(file, said["dtype"], tuple(said["shape"]), _LENGTH + n + said["data_offsets"][0])
