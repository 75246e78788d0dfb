"""Load weights into device arrays with the serving ones' names, shapes, dtypes and sharding."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from services.rollout.engines.base import StagedBase, StagedWeights
from services.rollout.engines.sglang_jax.loading.arrival import Arrival
from services.rollout.engines.sglang_jax.loading.checksum import Sums, combined, sums
from services.rollout.engines.sglang_jax.loading.layout import to_engine
from services.rollout.engines.sglang_jax.loading.restore import CheckpointLeaf, open_checkpoint, open_hugging_face
from shared.errors import WeightsError
from shared.models import adapter
from shared.published.chunks import reads
from shared.published.manifest import Chunk, WeightTree
from shared.published.order import by_arrival
from shared.run.checkpoint_files import PARAMS, ManifestFile, ManifestLeaf

_MOST_BYTES, _BESIDE_BYTES = 5, 2**26
"""A number of a checkpoint has four bytes at most, and folders and padding take some."""
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
    _bound_files(weights.files, weights.version, n_elements)
    if weights.base is not None:
        _bound_files(weights.base.files, weights.base.digest, n_elements)
    placed, found_sums, checksum_s = dict[str, jax.Array](), dict[str, Sums](), 0.0
    with _open(weights, arrival, bases) as found:
        read = time.perf_counter()
        _bound_leaves(found, max(leaf.size for leaf in current.values()))
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


class BaseCache:
    """Base of the adapters that were loaded last, kept in host memory so that it is read once."""

    def __init__(self) -> None:
        self._held: tuple[str, Mapping[str, np.ndarray]] = ("", {})

    def arrays(self, weights: StagedWeights, arrival: Arrival) -> Mapping[str, np.ndarray]:
        """Return the arrays of the adapters' base by the trainer's names; without a base, none, and none are held.

        Raises as `load_leaves`.
        """
        held, base = self._held, weights.base
        if base is None or held[0] != base.digest:
            held = self._held = ("", {})
        if base is not None and held[0] != base.digest:
            with _files(weights, Path(base.folder), PARAMS, base, f"base {base.digest}", arrival) as found:
                held = self._held = base.digest, {name: np.array(leaf.read()) for name, leaf in found.items()}
        return held[1]


@contextmanager
def _open(weights: StagedWeights, arrival: Arrival, bases: BaseCache) -> Iterator[Mapping[str, CheckpointLeaf]]:
    folder = Path(weights.folder)
    if weights.kind == "hf":
        yield open_hugging_face(folder)
        return
    base = bases.arrays(weights, arrival)
    with _files(weights, folder, weights.below, weights, weights.version, arrival) as found:
        yield _merged(base, found, weights.base.scale) if weights.base else found


@contextmanager
def _files(
    weights: StagedWeights, folder: Path, below: str, of: StagedWeights | StagedBase, what: str, arrival: Arrival
) -> Iterator[Mapping[str, CheckpointLeaf]]:
    """Open the arrays in a manifest's files, checked against its tree."""
    if weights.kind == "chunks":
        yield _chunked(folder, of, weights.seed, what, arrival)
        return
    with open_checkpoint(folder, below, of.files, what, arrival.check) as found:
        check_tree(found, of.tree)
        yield found


def _chunked(
    folder: Path, of: StagedWeights | StagedBase, seed: int | None, what: str, arrival: Arrival
) -> dict[str, CheckpointLeaf]:
    """Open the arrays of chunks, in the order in which they arrive."""
    tree = WeightTree(of.tree, tuple(Chunk(file.blake3, file.size) for file in of.files))
    arrays, leaves = (
        reads(folder, tree, what, arrival.wait_for),
        tree.leaves if seed is None else by_arrival(tree, seed),
    )
    return {leaf.key: CheckpointLeaf(leaf.shape, np.dtype(leaf.dtype), arrays[leaf.key]) for leaf in leaves}


def _merged(
    base: Mapping[str, np.ndarray], found: Mapping[str, CheckpointLeaf], scale: float
) -> Mapping[str, CheckpointLeaf]:
    """Merge adapters into their base, one array at a time."""
    _bound_leaves(found, max(value.size for value in base.values()))
    try:
        reads = adapter.merged(
            {name: partial(np.asarray, value) for name, value in base.items()},
            {name: leaf.read for name, leaf in found.items()},
            scale,
        )
    except ValueError as error:
        raise WeightsError(str(error), "load adapters that were trained on this base") from error
    return {name: CheckpointLeaf(base[name].shape, base[name].dtype, read) for name, read in reads.items()}


def _bound_files(files: Sequence[ManifestFile], what: str, n_elements: int) -> None:
    """Bound the bytes read into memory by the model's size, because a manifest may be wrong."""
    n_bytes = sum(file.size for file in files)
    if n_bytes > _MOST_BYTES * n_elements + _BESIDE_BYTES:
        raise WeightsError(f"{what} has {n_bytes} bytes, more than a model of {n_elements} numbers needs")


def _bound_leaves(found: Mapping[str, CheckpointLeaf], n_elements: int) -> None:
    for name, leaf in found.items():
        if math.prod(leaf.shape) > n_elements:
            raise WeightsError(f"{name} has shape {list(leaf.shape)}, which is larger than any array of the model")


def check_tree(found: Mapping[str, CheckpointLeaf], tree: Sequence[ManifestLeaf]) -> None:
    """Raises WeightsError naming the first leaf of `found` that differs from `tree`."""
    expected = {leaf.key: (leaf.shape, leaf.dtype) for leaf in tree}
    holds = {key: (leaf.shape, str(leaf.dtype)) for key, leaf in found.items()}
    for key in sorted(expected.keys() | holds.keys()):
        if expected.get(key) != holds.get(key):
            raise WeightsError(
                f"leaf {key}: the manifest says {expected.get(key, 'nothing')}, the checkpoint holds"
                f" {holds.get(key, 'nothing')}"
            )


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
