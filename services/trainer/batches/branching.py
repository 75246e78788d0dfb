"""Keys of the tokens of branching episodes, by which `packing` finds places that sequences may share.

A place predicts one token, so the sequences that share it have at most one sampled token after it. Within an episode a
branch shares its parent's places, sampled tokens included: the token after each belongs to the parent alone. If the
branch's first own token is in the loss, the last shared token, which predicts it, gets a second place.

Invariant: two sequences have equal keys up to a token only if they have the same tokens up to it, and if at most one
sampled token follows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TreeRow:
    """One sequence: `numbers` int32 [n] of its tokens, `mask` [n], index of its parent's row, number of shared tokens.

    `own_from` is the number of leading tokens that predict no own token of the loss.
    """

    numbers: np.ndarray
    mask: np.ndarray
    parent: int | None
    shared: int
    own_from: int


def tree_keys(rows: Sequence[TreeRow]) -> tuple[list[np.ndarray], list[int]]:
    """Return the key of each token, int32 [n] for each row, and the number of leading tokens of each row that count.

    A parent comes before its branches. Tokens of rows without branches keep their numbers.
    """
    unused = 1 + max(int(row.numbers.max(initial=0)) for row in rows)
    keys, n_shared = list[np.ndarray](), [row.own_from for row in rows]
    for row in rows:
        if row.parent is not None:
            n_shared[row.parent] = max(n_shared[row.parent], row.shared)
    for row, n in zip(rows, n_shared, strict=True):
        key = row.numbers.copy()
        before = 0  # tokens whose place is the parent's
        if row.parent is not None:
            before = row.shared if row.own_from >= row.shared else row.shared - 1
            key[:before] = keys[row.parent][:before]
        followed = before + np.flatnonzero(row.mask[before + 1 : n + 1])
        key[followed] = unused + np.arange(len(followed))
        unused += len(followed)
        keys.append(key)
    return keys, n_shared
