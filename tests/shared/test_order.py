"""The order in which chunks are pulled and arrays taken: everything once, both sides alike, and no array waits for a
chunk that comes after another's.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.published.manifest import Chunk, WeightTree
from shared.published.order import by_arrival, drawn, together
from shared.run.checkpoint_files import ManifestLeaf


def tree_of(n_leaves: list[int], sizes: list[int]) -> WeightTree:
    """Arrays of so many float32, in chunks of those sizes and a last one of the rest."""
    left, chunks = 4 * sum(n_leaves), list[int]()
    for size in sizes:
        if size < left:
            chunks.append(size)
            left -= size
    chunks += [left] * bool(left)
    leaves = tuple(ManifestLeaf(f"l{i}", (n,), "float32") for i, n in enumerate(n_leaves))
    return WeightTree(leaves, tuple(Chunk(f"{i:064x}", size) for i, size in enumerate(chunks)))


@pytest.mark.parametrize(("n", "size"), [(0, 1), (1, 1), (20, 1), (100, 3), (255, 7), (256, 8), (5001, 8)])
def test_every_chunk_comes_once_and_neighbours_together(n, size):
    assert together(n) == size
    orders = {tuple(drawn(range(n), seed)) for seed in range(20)}
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert (len(orders) > 1) == (n > size)
    for order in orders:
        assert sum(b == a + 1 for a, b in pairwise(order)) >= n - -(-n // size)
    assert drawn(range(n), 3) == drawn(range(n), 3)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.lists(st.integers(1, 60), max_size=60),
    st.integers(0, 2**32 - 1),
)
def test_arrays_are_in_the_order_of_their_last_chunk(n_leaves, sizes, seed):
    """Against the chunk of every single byte."""
    tree = tree_of(n_leaves, sizes)
    rank = {index: at for at, index in enumerate(drawn(range(len(tree.chunks)), seed))}
    chunk_of = np.repeat(np.arange(len(tree.chunks)), [chunk.size for chunk in tree.chunks])
    ends, last = np.cumsum([4 * n for n in n_leaves]), dict[str, int]()
    for leaf, n, end in zip(tree.leaves, n_leaves, ends, strict=True):
        last[leaf.key] = max((rank[int(i)] for i in chunk_of[end - 4 * n : end]), default=-1)
    found = [leaf.key for leaf in by_arrival(tree, seed)]
    assert sorted(found) == sorted(last)
    ranks = [last[key] for key in found if last[key] >= 0]
    assert ranks == sorted(ranks)
