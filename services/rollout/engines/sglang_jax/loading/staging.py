"""Load weights into device arrays with the serving ones' names, shapes, dtypes and sharding."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import jax
import numpy as np

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.arrays.opening import BaseCache, bound_files, bound_leaves, open_arrays
from services.rollout.engines.sglang_jax.loading.checksum import Sums, combined, sums
from services.rollout.engines.sglang_jax.loading.layout import to_engine
from services.rollout.engines.staged import StagedWeights
from shared.errors import WeightsError

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def load_leaves(
    runner: Any, weights: StagedWeights, arrival: Arrival, bases: BaseCache
) -> tuple[list[jax.Array], str, dict[str, float]]:
    """Return the leaves in the runner's order on its devices, their checksum, and durations in seconds.

    `read_s` is for opening files, `place_s` for making device arrays, `checksum_s` for the checksum; the last two count
    from the arrival of the last chunk. While one array is placed and hashed, the next is awaited and read. Adapters are
    merged into the base that `bases` keeps.

    Shapes and committed shardings equal the serving ones', so a commit swaps pointers and never recompiles.

    Raises:
        WeightsError: the files are not the manifest's, or their tree or shapes are not the manifest's or the model's.
        Unavailable: the files cannot be read now.
        MemoryError: host or device memory does not hold a second copy.
    """
    start = time.perf_counter()
    current = dict(zip(leaf_names(runner), runner.model_state_leaves, strict=True))
    n_elements = sum(leaf.size for leaf in current.values())
    bound_files(weights.files, weights.version, n_elements)
    if weights.base is not None:
        bound_files(weights.base.files, weights.base.digest, n_elements)
    placed, found_sums, checksum_s = dict[str, jax.Array](), dict[str, Sums](), 0.0
    with open_arrays(weights, arrival, bases) as found:
        read = time.perf_counter()
        bound_leaves(found, max(leaf.size for leaf in current.values()))
        shapes = {name: leaf.shape for name, leaf in current.items()}
        arrays = to_engine({k: v.read for k, v in found.items()}, shapes, runner.model_config.head_dim)
        with closing(_ahead(arrays)) as ready, arrival.ended_by_failure():
            for name, value in ready:
                arrival.check()
                placed[name] = _place(name, value, current[name], exact=weights.kind != "hf")
                begun = time.perf_counter()
                found_sums[name] = sums(placed[name])
                checksum_s += arrival.seconds_since(begun)
    begun = time.perf_counter()
    checksum = combined([found_sums[name] for name in current])
    checksum_s += arrival.seconds_since(begun)
    place_s = arrival.seconds_since(read) - checksum_s
    timings = {"read_s": read - start, "place_s": place_s, "checksum_s": checksum_s}
    return [placed[name] for name in current], checksum, timings


def _ahead[T](given: Iterator[T]) -> Iterator[T]:
    """Yield the same items; make the next in a thread while one is used. Closing waits for the item being made."""
    with ThreadPoolExecutor(1, "read") as reader:
        following = reader.submit(next, given, None)
        try:
            while (one := following.result()) is not None:
                following = reader.submit(next, given, None)
                yield one
        finally:
            del following  # it holds a failure, whose frames hold it and all arrays


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
        # A transposed array is copied by JAX, which is several times as fast at it as numpy.
        return jax.block_until_ready(jax.device_put(np.asarray(value, like.dtype), like.sharding))
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY in str(error):
            raise MemoryError(str(error).splitlines()[0]) from error
        raise
