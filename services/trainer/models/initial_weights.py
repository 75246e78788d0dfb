"""Where initial weights come from: safetensors files, or a seeded generator when the folder has none. No JAX here.

Invariant: one leaf at a time is in host memory, so a model larger than half the host's memory still loads.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from safetensors import SafetensorError, safe_open

from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.names import from_hf, hf_name

type Leaves = Callable[[str, tuple[int, ...]], np.ndarray]

_RESIDUAL = (".attn.o_proj.w", ".mlp.down_proj.kernel")


def leaves_of(folder: Path, model: ModelConfig, seed: int) -> Leaves:
    """The folder's safetensors if it has any, else random weights of `seed`."""
    files = sorted(folder.glob("*.safetensors"))
    return safetensors_leaves(folder, files) if files else random_leaves(model, seed)


def random_leaves(model: ModelConfig, seed: int) -> Leaves:
    """Normal weights with the config's initializer_range; projections onto the residual stream are scaled by 1/sqrt(2
    L), biases are 0 and norms 1.

    Every leaf has a generator of its own, seeded by its name, so values depend on neither order nor sharding.
    """

    def leaf(name: str, size: tuple[int, ...]) -> np.ndarray:
        if name.endswith("norm.w"):
            return np.ones(size, np.float32)
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

    def leaf(name: str, size: tuple[int, ...]) -> np.ndarray:
        source = where.get(hf_name(name))
        if source is None:
            raise ConfigError(
                f"model folder {folder} lacks the tensor {hf_name(name)}",
                "is it complete, and of the family that config.json names?",
            )
        try:
            return from_hf(name, _read(source, hf_name(name)), size)
        except ValueError as error:
            raise ConfigError(f"model file {source}: {error}") from error

    return leaf


def _index(folder: Path, files: list[Path]) -> dict[str, Path]:
    """Tensor name -> file. An index file that names an absent shard is an incomplete download."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            named = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"model file {index} is no index of tensors: {error!r}", "the download is incomplete or damaged"
            ) from error
        absent = sorted(path.name for path in named if not path.exists())
        if absent:
            raise ConfigError(f"model folder {folder} lacks {', '.join(absent)}", "the download is incomplete")
    where: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as tensors:
                where.update(dict.fromkeys(tensors.keys(), file))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model file {file} cannot be read: {error}") from error
    return where


def _read(file: Path, name: str) -> np.ndarray:
    with safe_open(file, framework="np") as tensors:
        return tensors.get_tensor(name)
