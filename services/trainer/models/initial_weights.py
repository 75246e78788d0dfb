"""Initial weights: those of the model's folder, or random ones if the configuration asks for them. Without JAX.

Invariant: host memory holds one leaf at a time, and of a file's leaf only the requested part, so a model larger than
half the host's memory still loads.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from services.trainer.models.arrays import HostArray
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.names import from_hf, hf_name, in_files, is_experts
from shared.models.weight_files import check_random, weight_files
from shared.process import telemetry

type Leaves = Callable[[str, tuple[int, ...]], HostArray]

_log = telemetry.Log("model")
_LENGTH = 8
_ROWS = 4096
_PREFIX = "model."
_TIED = ("lm_head.weight", "model.embed_tokens.weight")
_BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
"""Constants that older versions of transformers saved with the parameters."""
_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_RESIDUAL = (".o_proj.w", ".o_proj.kernel", ".down_proj.kernel", ".mlp.down_proj")


def leaves_of(folder: Path, model: ModelConfig, seed: int, *, random: bool = False) -> Leaves:
    """Load the weights of the folder as transformers does, or make `random` ones from `seed`.

    Raises ConfigError.
    """
    if random:
        check_random(folder)
        _log.warning("the model starts from random weights", folder=str(folder), seed=seed)
        return random_leaves(model, seed)
    return safetensors_leaves(folder, weight_files(folder), tied=model.tie_word_embeddings)


def random_leaves(model: ModelConfig, seed: int) -> Leaves:
    """Make normal weights with the config's initializer_range.

    Projections onto the residual stream are scaled by 1/sqrt(2 L), biases are 0, and norms multiply by 1. Every leaf
    has its own generator, seeded by its name, so values depend on neither order nor sharding.
    """

    def leaf(name: str, size: tuple[int, ...]) -> np.ndarray:
        if name.endswith("norm.w"):
            return np.full(size, 0.0 if model.family.norms_add_one else 1.0, np.float32)
        if name.endswith("_bias"):
            return np.zeros(size, np.float32)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        scale = model.initializer_range
        if name.endswith(_RESIDUAL):
            scale /= math.sqrt(2 * model.num_hidden_layers)
        return rng.standard_normal(size, np.float32) * np.float32(scale)

    return leaf


def safetensors_leaves(folder: Path, files: Sequence[Path], *, tied: bool = False) -> FileLeaves:
    """Open leaves in safetensors files. With `tied` embeddings a stored lm_head must equal them.

    Raises ConfigError naming a file that cannot be read; the leaves raise it for a missing tensor or a wrong shape.
    """
    where = places_of(files)
    if tied:
        _check_tied(where)
    return FileLeaves(folder, where)


class FileLeaves:
    """Leaves by name and shape, read from the places of their tensors."""

    def __init__(self, folder: Path, where: dict[str, _Place]) -> None:
        self._folder, self._where, self._alike = folder, where, _alike(where)
        self._unread = {name for name in where if name not in _TIED and not name.endswith(_BUFFERS)}

    @property
    def unread(self) -> list[str]:
        """Tensors of the files that were never requested."""
        return sorted(self._unread)

    def __call__(self, name: str, size: tuple[int, ...]) -> HostArray:
        called = hf_name(name)
        if not is_experts(name):
            return self._tensor(name, called, size)
        return StackedTensors([self._tensor(name, one, size[1:]) for one in in_files(called, size[0])])

    def _tensor(self, name: str, called: str, size: tuple[int, ...]) -> FileTensor:
        source = self._where.get(called)
        if source is None:
            raise ConfigError(
                f"model folder {self._folder} lacks the tensor {called}",
                "with tied embeddings, config.json says tie_word_embeddings: true"
                if called in _TIED
                else "is it complete, and of the family that config.json names?",
            )
        if others := [name for name in self._alike[_bare(called)] if name != called]:
            raise ConfigError(
                f"model file {source.file} holds {called}, and the folder also {others[0]}, which transformers reads as"
                " the same parameter",
                "rewrite the model without the one that does not belong to it",
            )
        self._unread.discard(called)
        try:
            return FileTensor(from_hf(name, source.mapped(), size))
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"model file {source.file}: {error}", "are config.json and the weights of the same model?"
            ) from error


class FileTensor:
    """Leaf that is a tensor of a file: `[index]` reads that part, numpy.asarray all."""

    def __init__(self, mapped: np.ndarray) -> None:
        self._mapped, self.shape, self.dtype = mapped, mapped.shape, mapped.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.array(self._mapped[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._mapped, dtype)


class StackedTensors:
    """Leaf that stacks tensors of one shape and dtype along a new first axis; an index reads only the part it names."""

    def __init__(self, parts: list[FileTensor]) -> None:
        self._parts, self.shape, self.dtype = parts, (len(parts), *parts[0].shape), parts[0].dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *rest = index if isinstance(index, tuple) else (index,)
        return np.stack([part[tuple(rest)] for part in self._parts[first]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack([np.asarray(part, dtype) for part in self._parts])


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a tensor in a file; `offset` is in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def mapped(self) -> np.ndarray:
        """Map the tensor. Raises ValueError for an unsupported dtype, OSError."""
        if self.dtype not in _DTYPES:
            raise ValueError(f"numbers of type {self.dtype}, expected one of {', '.join(_DTYPES)}")
        return np.memmap(self.file, _DTYPES[self.dtype], "r", self.offset, self.shape)


def places_of(files: Sequence[Path]) -> dict[str, _Place]:
    """Find the place of every tensor by name. Raises ConfigError."""
    where: dict[str, _Place] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as tensors:  # checks offsets and sizes
                names = set(tensors.keys())
            found = {name: place for name, place in _places(file) if name in names}
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"model file {file} cannot be read: {error}",
                "it is damaged, or its download was cut off: download it again",
            ) from error
        if twice := sorted(found.keys() & where.keys()):
            raise ConfigError(
                f"model files {where[twice[0]].file} and {file} both hold the tensor {twice[0]}",
                "take the folder as its authors published it, or rewrite it with transformers' save_pretrained",
            )
        where |= found
    return where


def _bare(name: str) -> str:
    """Parameter's name without the base model's prefix, which transformers adds and removes as needed."""
    while name.startswith(_PREFIX):
        name = name.removeprefix(_PREFIX)
    return name


def _alike(where: Iterable[str]) -> dict[str, list[str]]:
    """Group the names in files that transformers reads as the same parameter, by bare name."""
    found: dict[str, list[str]] = {}
    for name in sorted(where):
        found.setdefault(_bare(name), []).append(name)
    return found


def _check_tied(where: dict[str, _Place]) -> None:
    """Check that a stored lm_head equals the embeddings. Raises ConfigError.

    transformers 4 would ignore a different one, transformers 5 would use it.
    """
    alike = _alike(where)
    heads, embeddings = ([where[name] for name in alike.get(_bare(name), ())] for name in _TIED)
    for head in heads if embeddings else ():
        _check_head(head, embeddings[0])


def _check_head(head: _Place, embeddings: _Place) -> None:
    """Check that the two tensors are equal. Raises ConfigError."""
    try:
        one, other = head.mapped(), embeddings.mapped()
    except (ValueError, OSError) as error:
        raise ConfigError(f"model file {head.file}: {error}") from error
    rows = range(0, len(one), _ROWS) if one.shape and one.shape == other.shape else None
    if rows is None or not all(np.array_equal(one[i : i + _ROWS], other[i : i + _ROWS]) for i in rows):
        raise ConfigError(
            f"model file {head.file}: {_TIED[0]} differs from {_TIED[1]}, but config.json says tie_word_embeddings:"
            " true",
            "correct config.json, or remove the tensor that the model does not use",
        )


def _places(file: Path) -> Iterator[tuple[str, _Place]]:
    """Read the places from a file's header: eight bytes of length, then JSON."""
    with file.open("rb") as data:
        n = int.from_bytes(data.read(_LENGTH), "little")
        header = json.loads(data.read(n))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _Place(file, entry["dtype"], tuple(entry["shape"]), _LENGTH + n + entry["data_offsets"][0])
