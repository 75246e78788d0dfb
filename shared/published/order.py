"""Order in which a server pulls the chunks of a version, and its engine takes the arrays that they make.

The order is random for each update: servers that pull the same version soon have different chunks, and get the others
from each other. In a version of many chunks, a few that follow each other in the stream stay together, because small
arrays share chunks with their neighbours. Service and engine are two processes, and use the same seed.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from shared.published.manifest import WeightTree, leaf_bytes
from shared.run.checkpoint_files import ManifestLeaf

_MOST_TOGETHER, _LEAST_PARTS = 8, 32


def together(n: int) -> int:
    """Return how many of n chunks stay together; 1 if all servers would otherwise start with the same few."""
    return max(1, min(_MOST_TOGETHER, n // _LEAST_PARTS))


def drawn[T](chunks: Sequence[T], seed: int) -> list[T]:
    """Return the chunks of a stream in the order in which they are pulled."""
    size = together(len(chunks))
    parts = [chunks[i : i + size] for i in range(0, len(chunks), size)]
    random.Random(seed).shuffle(parts)
    return [chunk for part in parts for chunk in part]


def by_arrival(tree: WeightTree, seed: int) -> list[ManifestLeaf]:
    """Sort the arrays by the arrival of their last chunk."""
    starts = list(accumulate((chunk.size for chunk in tree.chunks), initial=0))
    rank = {index: at for at, index in enumerate(drawn(range(len(tree.chunks)), seed))}

    def last(start: int, end: int) -> int:
        if start == end:
            return -1
        return max(rank[index] for index in range(bisect_right(starts, start) - 1, bisect_right(starts, end - 1)))

    ends = list(accumulate(map(leaf_bytes, tree.leaves)))
    ranks = {leaf.key: last(end - leaf_bytes(leaf), end) for leaf, end in zip(tree.leaves, ends, strict=True)}
    return sorted(tree.leaves, key=lambda leaf: ranks[leaf.key])
