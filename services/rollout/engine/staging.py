"""Loads weights into device arrays exactly like the serving ones: names, shapes, dtypes and sharding."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from services.rollout.engine.layout import to_engine
from services.rollout.engine.restore import restore

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def load_leaves(runner: Any, path: str, kind: str) -> tuple[list[jax.Array], dict[str, float]]:
    """The leaves in the runner's order, on its devices, and durations in seconds (`restore_s`, `place_s`).

    Equal shapes and committed equal shardings are what lets a commit be a swap of pointers that never recompiles.

    Raises:
        WeightsError: the checkpoint is incomplete, or its tree or shapes differ from the model's.
        MemoryError: host or device memory does not hold a second copy.
    """
    start = time.perf_counter()
    flat = restore(path, kind)
    restored = time.perf_counter()
    names = leaf_names(runner)
    current = dict(zip(names, runner.model_state_leaves, strict=True))
    shapes = {name: leaf.shape for name, leaf in current.items()}
    placed = to_engine(flat, shapes, kind, runner.model_config.head_dim)
    leaves = [_place(placed[name], current[name]) for name in names]
    done = time.perf_counter()
    return leaves, {"restore_s": restored - start, "place_s": done - restored}


def leaf_names(runner: Any) -> list[str]:
    """Dotted names of the model's leaves, in the order of `runner.model_state_leaves`."""
    state = jax.tree_util.tree_unflatten(runner._model_state_def, runner.model_state_leaves)
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    return [".".join(part for part in map(_key, path) if part != "value") for path, _ in paths]


def _key(part: Any) -> str:
    return str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))


def _place(value: np.ndarray, like: jax.Array) -> jax.Array:
    try:
        return jax.block_until_ready(jax.device_put(np.ascontiguousarray(value, dtype=like.dtype), like.sharding))
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY in str(error):
            raise MemoryError(str(error).splitlines()[0]) from error
        raise
