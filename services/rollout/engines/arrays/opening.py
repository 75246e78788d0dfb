"""Arrays of staged weights by their names in the checkpoint, from chunks, Orbax or safetensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.arrays.restore import CheckpointLeaf, open_checkpoint, open_hugging_face
from services.rollout.engines.staged import StagedBase, StagedWeights
from shared.errors import WeightsError
from shared.published.chunks import reads
from shared.published.manifest import Chunk, WeightTree
from shared.published.order import by_arrival
from shared.run.checkpoint_files import PARAMS, ManifestFile, ManifestLeaf

_MOST_BYTES, _BESIDE_BYTES = 5, 2**26
"""A number of a checkpoint has four bytes at most, and folders and padding take some."""


@contextmanager
def open_arrays(weights: StagedWeights, arrival: Arrival) -> Iterator[Mapping[str, CheckpointLeaf]]:
    """Open the arrays of staged weights; those of a version with a base are adapters.

    Raises WeightsError, Unavailable and MemoryError, as their readers do.
    """
    folder = Path(weights.folder)
    if weights.kind == "hf":
        yield open_hugging_face(folder)
        return
    with _files(weights, folder, weights.below, weights, weights.version, arrival) as found:
        yield found


@contextmanager
def open_base(weights: StagedWeights, base: StagedBase, arrival: Arrival) -> Iterator[Mapping[str, CheckpointLeaf]]:
    """Open the arrays of the base of adapters. Raises as `open_arrays`."""
    with _files(weights, Path(base.folder), PARAMS, base, f"base {base.digest}", arrival) as found:
        yield found


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


def bound_files(files: Sequence[ManifestFile], what: str, n_elements: int) -> None:
    """Bound the bytes read into memory by the model's size, because a manifest may be wrong."""
    n_bytes = sum(file.size for file in files)
    if n_bytes > _MOST_BYTES * n_elements + _BESIDE_BYTES:
        raise WeightsError(f"{what} has {n_bytes} bytes, more than a model of {n_elements} numbers needs")


def bound_leaves(found: Mapping[str, CheckpointLeaf], n_elements: int) -> None:
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
                f"leaf {key}: the manifest says {expected.get(key, 'nothing')}, but the checkpoint has"
                f" {holds.get(key, 'nothing')}"
            )
