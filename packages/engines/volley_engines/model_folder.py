"""Staged weights as a Hugging Face folder, which a server of another project is told to load.

The folder holds the model's config.json and tokenizer beside the weights, so that a server can also be started from it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save_file

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.arrays.opening import bound_files, bound_leaves
from services.rollout.engines.arrays.restore import CheckpointLeaf
from services.rollout.engines.staged import StagedWeights
from shared.errors import WeightsError
from shared.files.storage import check_room, storage
from shared.models.config import ModelConfig
from shared.models.names import is_leaf, to_files
from shared.models.weight_files import INDEX, WEIGHTS
from volley_engines.merging import BaseCache, open_merged

SHARD_BYTES = 2 * 2**30
"""A shard is written once its tensors have this many bytes; host memory holds one shard at a time."""
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
)


def write(
    weights: StagedWeights, model_path: Path, folder: Path, arrival: Arrival, bases: BaseCache
) -> tuple[frozenset[str], dict[str, float]]:
    """Write the folder whole or not at all; return the tensors' names, and durations in seconds. It blocks.

    Raises WeightsError (files, names or shapes differ), Unavailable, StorageFull, or what `arrival` raises.
    """
    start = time.perf_counter()
    draft = folder.with_name(f"{folder.name}.draft")
    n_numbers = ModelConfig.read(model_path).n_numbers
    bound_files(weights.files, weights.version, n_numbers)
    if weights.base is not None:
        bound_files(weights.base.files, weights.base.digest, n_numbers)
    with storage(folder.parent):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            with open_merged(weights, arrival, bases) as found, arrival.ended_by_failure():
                bound_leaves(found, n_numbers)
                n_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in found.values())
                check_room(folder.parent, n_bytes)
                names = _write_tensors(found, draft, arrival.check)
            for file in (file for pattern in _BESIDE for file in model_path.glob(pattern)):
                shutil.copy(file, draft / file.name)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return frozenset(names), {"write_s": arrival.seconds_since(start)}


def _write_tensors(found: Mapping[str, CheckpointLeaf], draft: Path, check: Callable[[], None]) -> list[str]:
    """Write shards and their index; return the names of all tensors."""
    shards = dict[str, str]()
    n_bytes = 0
    for number, shard in enumerate(_shards(found, check), start=1):
        name = f"model-{number:05}.safetensors"
        save_file(shard, draft / name, metadata={"format": "pt"})
        shards |= dict.fromkeys(shard, name)
        n_bytes += sum(tensor.nbytes for tensor in shard.values())
    if len({*shards.values()}) == 1:
        (draft / next(iter(shards.values()))).rename(draft / WEIGHTS)
    else:
        index: dict[str, Any] = {"metadata": {"total_size": n_bytes}, "weight_map": shards}
        (draft / INDEX).write_bytes(orjson.dumps(index))
    return [*shards]


def _shards(found: Mapping[str, CheckpointLeaf], check: Callable[[], None]) -> Iterator[dict[str, np.ndarray]]:
    shard, n_bytes = dict[str, np.ndarray](), 0
    for name, leaf in found.items():
        check()
        value = leaf.read()
        try:
            tensors = to_files(name, value) if is_leaf(name) else {name: value}
        except ValueError as error:
            raise WeightsError(f"{name} has shape {list(value.shape)}, which no tensor of the model has") from error
        shard |= {key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}
        n_bytes += value.nbytes
        if n_bytes >= SHARD_BYTES:
            yield shard
            shard, n_bytes = {}, 0
    if shard:
        yield shard
