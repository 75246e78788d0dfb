"""Loads weights into device arrays exactly like the serving ones: names, shapes, dtypes and sharding."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from services.rollout.engines.sglang_jax.weights.layout import to_engine
from services.rollout.engines.sglang_jax.weights.restore import restore
from shared.errors import WeightsError

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def load_leaves(
    runner: Any, path: str, kind: str, tree: Sequence[Mapping[str, Any]]
) -> tuple[list[jax.Array], dict[str, float]]:
    """The leaves in the runner's order, on its devices, and durations in seconds (`restore_s`, `place_s`).

    Args:
        tree: key, shape and dtype of every leaf that must be on disk; empty where nobody has said.

    Equal shapes and committed equal shardings are what lets a commit be a swap of pointers that never recompiles.

    Raises:
        WeightsError: the checkpoint is incomplete, or its tree or shapes differ from `tree` or the model's.
        MemoryError: host or device memory does not hold a second copy.
    """
    start = time.perf_counter()
    flat = restore(path, kind)
    if tree:
        check_tree(flat, tree)
    restored = time.perf_counter()
    names = leaf_names(runner)
    current = dict(zip(names, runner.model_state_leaves, strict=True))
    shapes = {name: leaf.shape for name, leaf in current.items()}
    placed = to_engine(flat, shapes, kind, runner.model_config.head_dim)
    leaves = [_place(name, placed[name], current[name], exact=bool(tree)) for name in names]
    done = time.perf_counter()
    return leaves, {"restore_s": restored - start, "place_s": done - restored}


def check_tree(flat: Mapping[str, np.ndarray], tree: Sequence[Mapping[str, Any]]) -> None:
    """Raises WeightsError naming the first leaf of `flat` that is not as `tree` says."""
    expected = {leaf["key"]: (tuple(leaf["shape"]), leaf["dtype"]) for leaf in tree}
    found = {key: (value.shape, str(value.dtype)) for key, value in flat.items()}
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            says, holds = expected.get(key, "nothing"), found.get(key, "nothing")
            raise WeightsError(f"leaf {key}: the manifest says {says}, the checkpoint holds {holds}")


def leaf_names(runner: Any) -> list[str]:
    """Dotted names of the model's leaves, in the order of `runner.model_state_leaves`."""
    state = jax.tree_util.tree_unflatten(runner._model_state_def, runner.model_state_leaves)
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    return [".".join(part for part in map(_key, path) if part != "value") for path, _ in paths]


def _key(part: Any) -> str:
    return str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))


def _place(name: str, value: np.ndarray, like: jax.Array, *, exact: bool) -> jax.Array:
    if exact and not np.can_cast(value.dtype, like.dtype):
        raise WeightsError(
            f"{name} is {value.dtype}, the engine computes with {like.dtype}", "is model.dtype the trainer's?"
        )
    try:
        return jax.block_until_ready(jax.device_put(np.ascontiguousarray(value, dtype=like.dtype), like.sharding))
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY in str(error):
            raise MemoryError(str(error).splitlines()[0]) from error
        raise
