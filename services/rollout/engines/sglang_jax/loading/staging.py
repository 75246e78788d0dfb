"""Load weights into device arrays with the serving ones' names, shapes, dtypes and sharding."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.arrays.opening import bound_files, bound_leaves, open_arrays, open_base
from services.rollout.engines.arrays.restore import CheckpointLeaf, open_unmerged
from services.rollout.engines.sglang_jax.loading.checksum import Sums, combined, sums
from services.rollout.engines.sglang_jax.loading.layout import to_adapters, to_engine
from services.rollout.engines.sglang_jax.scheduling.adapters import Adapters, EngineWeights, adapter_of
from services.rollout.engines.staged import StagedWeights
from shared.errors import WeightsError

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


class HeldBase(NamedTuple):
    """Base of adapters on its devices: digest of its files, leaves in the runner's order, and their checksum."""

    digest: str
    leaves: list[jax.Array]
    checksum: str


class LoadedArrays(NamedTuple):
    """Arrays of a version, their checksum, durations in seconds, and the base of its adapters, if it has any."""

    weights: EngineWeights
    checksum: str
    timings: dict[str, float]
    base: HeldBase | None


@dataclass
class _Summed:
    """Placed arrays in the runner's order, their sums, and the seconds that these took once all chunks were here."""

    leaves: list[jax.Array]
    sums: list[Sums]
    seconds: float = 0.0


def load_leaves(runner: Any, weights: StagedWeights, arrival: Arrival, base: HeldBase | None = None) -> LoadedArrays:
    """Load weights onto the runner's devices.

    `read_s` is for opening files, `place_s` for making device arrays, `checksum_s` for the checksum; the last two count
    from the arrival of the last chunk. While one array is placed and hashed, the next is awaited and read. Adapters
    share the arrays of `base` if it is theirs and still has its checksum; otherwise their base is loaded too.

    Shapes and committed shardings equal the serving ones', so a commit swaps pointers and recompiles nothing.
    Adapters of other shapes than the serving ones compile at their first use.

    Raises:
        WeightsError: the files are not the manifest's, or their tree or shapes are not the manifest's or the model's.
        Unavailable: the files cannot be read now.
        MemoryError: host or device memory does not hold the new arrays.
    """
    start = time.perf_counter()
    current = dict(zip(leaf_names(runner), runner.model_state_leaves, strict=True))
    n_elements = sum(leaf.size for leaf in current.values())
    bound_files(weights.files, weights.version, n_elements)
    adapters: Adapters = {}
    if weights.base is None:
        base = None
        with open_arrays(weights, arrival) as found:
            read = time.perf_counter()
            made = _leaves(runner, current, found, arrival, exact=weights.kind != "hf")
        if weights.kind == "hf" and (unmerged := open_unmerged(Path(weights.folder))) is not None:
            adapters = _adapters(runner, current, *unmerged, arrival)
    else:
        bound_files(weights.base.files, weights.base.digest, n_elements)
        made = None if base is None or base.digest != weights.base.digest else _unchanged(base)
        if made is None:
            with open_base(weights, weights.base, arrival) as found:
                made = _leaves(runner, current, found, arrival, exact=True)
            base = HeldBase(weights.base.digest, made.leaves, combined(made.sums))
        with open_arrays(weights, arrival) as found:
            read = time.perf_counter()
            adapters = _adapters(runner, current, found, weights.base.scale, arrival)
    started_at = time.perf_counter()
    total = combined([*made.sums, *map(sums, jax.tree.leaves(adapters))])
    checksum_s = made.seconds + arrival.seconds_since(started_at)
    timings = {"read_s": read - start, "place_s": arrival.seconds_since(read) - checksum_s, "checksum_s": checksum_s}
    return LoadedArrays(EngineWeights(made.leaves, adapters), total, timings, base)


def _unchanged(base: HeldBase) -> _Summed | None:
    """Return the base's arrays with their sums; None if its memory has changed."""
    made = _Summed(base.leaves, [sums(leaf) for leaf in base.leaves])
    return made if combined(made.sums) == base.checksum else None


def _leaves(
    runner: Any,
    current: Mapping[str, jax.Array],
    found: Mapping[str, CheckpointLeaf],
    arrival: Arrival,
    *,
    exact: bool,
) -> _Summed:
    """Place and sum the model's arrays."""
    bound_leaves(found, max(leaf.size for leaf in current.values()))
    shapes = {name: leaf.shape for name, leaf in current.items()}
    arrays = to_engine({k: v.read for k, v in found.items()}, shapes, runner.model_config.head_dim)
    placed, found_sums, seconds = dict[str, jax.Array](), dict[str, Sums](), 0.0
    with closing(_prefetched(arrays)) as ready, arrival.ended_by_failure():
        for name, value in ready:
            arrival.check()
            placed[name] = _place(name, value, current[name], exact=exact)
            started_at = time.perf_counter()
            found_sums[name] = sums(placed[name])
            seconds += arrival.seconds_since(started_at)
    return _Summed([placed[name] for name in current], [found_sums[name] for name in current], seconds)


def _adapters(
    runner: Any, current: Mapping[str, jax.Array], found: Mapping[str, CheckpointLeaf], scale: float, arrival: Arrival
) -> Adapters:
    """Place adapters next to their weights. Raises WeightsError for an adapter of an unsupported weight."""
    bound_leaves(found, max(leaf.size for leaf in current.values()))
    shapes = {name: leaf.shape for name, leaf in current.items()}
    made: Adapters = {}
    with arrival.ended_by_failure():
        for name, read in to_adapters({k: v.read for k, v in found.items()}, shapes, runner.model_config.head_dim):
            arrival.check()
            with _device_memory():
                made[name] = adapter_of(runner.model, name, *read(), scale)
    return made


def zero_adapters(runner: Any, shapes: Mapping[str, Sequence[int]]) -> Adapters:
    """Make adapters that change nothing, so that the shapes of later ones are compiled at the start.

    Args:
        shapes: of the matrices, by the trainer's names.
    """
    found = {
        name: CheckpointLeaf(tuple(shape), np.dtype(np.float32), partial(np.zeros, shape, np.float32))
        for name, shape in shapes.items()
    }
    current = dict(zip(leaf_names(runner), runner.model_state_leaves, strict=True))
    return _adapters(runner, current, found, 1.0, Arrival(lambda: None, is_complete=True))


def _prefetched[T](given: Iterator[T]) -> Generator[T]:
    """Yield the same items, making the next one in a thread. Closing waits for the item being made."""
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
            f"{name} is {value.dtype}, but the engine computes with {like.dtype}", "is model.dtype the trainer's?"
        )
    with _device_memory():
        # A transposed array is copied by JAX, which is several times as fast at it as numpy.
        return jax.block_until_ready(jax.device_put(np.asarray(value, like.dtype), like.sharding))


@contextmanager
def _device_memory() -> Iterator[None]:
    """Raises MemoryError in place of JAX's error for a device that is full."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY in str(error):
            raise MemoryError(str(error).splitlines()[0]) from error
        raise
