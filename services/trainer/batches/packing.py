"""Packing of sequences into rows, with shared prefixes stored once.

The sequences of a row are a trie, laid out depth first (see models.attention). Sequences share only tokens that predict
no token of the loss: a prompt without its last token, which predicts the first sampled one. Sequences of one episode
also share sampled tokens: see `branching`.

Rows are filled greedily: prompt by prompt, the largest first, each sequence into the row that already holds most of its
prompt, and of those into the fullest with room (best fit decreasing, if nothing is shared). Each row length is tried as
the default, and the cheapest result is used; longer sequences get a longer row. At the end each row is cut to the
smallest length that holds it.

Invariant: the same sequences in the same order get the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

_EVEN_LENGTH = 1024
"""Row length, in tokens, at which attention costs about as much as the rest of the model. On a CPU about 400 were
measured for a hidden size of 64 and 2,000 for 576; the value only decides which row length is chosen.
"""


@dataclass(frozen=True, slots=True)
class SequencePlace:
    """Place of a `sequence` in a micro-batch: the `columns` of its tokens in `row`, int64 [n], ascending."""

    sequence: int
    row: int
    columns: np.ndarray


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Places of sequences in a micro-batch of `shape` [B, T]; if not `packed`, each row has one, from column 0."""

    shape: tuple[int, int]
    places: tuple[SequencePlace, ...]
    packed: bool

    @property
    def n_tokens(self) -> int:
        """Number of positions that hold a token; those after a row's last one are filler."""
        ends: dict[int, int] = {}
        for place in self.places:
            ends[place.row] = max(ends.get(place.row, 0), int(place.columns[-1]) + 1)
        return sum(ends.values())


@dataclass(frozen=True, slots=True)
class RowShapes:
    """Shapes of packed rows.

    `lengths` ascend; a micro-batch has at most `tokens` positions, and its rows divide over `shards`.
    """

    lengths: tuple[int, ...]
    tokens: int
    shards: int

    def fitting(self, n_tokens: int) -> int:
        """Return the smallest length that holds `n_tokens`."""
        return next(length for length in self.lengths if n_tokens <= length)

    @property
    def affordable(self) -> list[int]:
        """Lengths of which one row for each shard is within `tokens`, and always the shortest."""
        return [length for length in self.lengths if length * self.shards <= self.tokens] or [self.lengths[0]]

    def at_once(self, length: int) -> list[int]:
        """Numbers of rows of this length that a micro-batch may have, descending.

        As many as `tokens` allow, a quarter of that, and so on, down to one for each shard: the last rows of a step use
        smaller micro-batches, which have few empty rows.
        """
        rows = max(1, self.tokens // length // self.shards)
        return [rows // 4**k * self.shards for k in range(rows.bit_length()) if rows // 4**k] + [self.shards]


@dataclass(frozen=True, slots=True)
class _Filled:
    """Sequences of a row in depth-first order, and the columns of their tokens."""

    length: int
    sequences: tuple[int, ...]
    columns: tuple[np.ndarray, ...]


def packed(sequences: Sequence[np.ndarray], own_from: Sequence[int], shapes: RowShapes) -> list[MicroBatch]:
    """Pack sequences of ids int32 [n]; of each the first `own_from` tokens may be shared.

    There is at least one sequence, and none is longer than the longest row.
    """
    prompts = _Prompts(sequences, own_from)
    tried = [_filled(prompts, length, shapes) for length in shapes.affordable]
    return _micro_batches(min(tried, key=lambda rows: _cost(rows, shapes)), shapes)


class _Prompts:
    """Distinct prompts in lexicographic order, so that neighbours share the longest prefixes."""

    def __init__(self, sequences: Sequence[np.ndarray], own_from: Sequence[int]) -> None:
        self.n_tokens = [len(ids) for ids in sequences]
        keys = [ids[:n].astype(">i4").tobytes() for ids, n in zip(sequences, own_from, strict=True)]
        distinct = sorted(set(keys))
        rank = {key: i for i, key in enumerate(distinct)}
        self.of = [rank[key] for key in keys]
        """Number of each sequence's prompt."""
        arrays = [np.frombuffer(key, ">i4") for key in distinct]
        self.lengths = np.array([len(prompt) for prompt in arrays], np.int64)
        self._neighbours = np.array([_common(a, b) for a, b in pairwise(arrays)], np.int64)

    def in_common(self, prompt: int) -> np.ndarray:
        """Compute int64 [number of prompts]: the length of the prefix that each shares with this one."""
        before = np.minimum.accumulate(self._neighbours[:prompt][::-1])[::-1]
        after = np.minimum.accumulate(self._neighbours[prompt:])
        return np.concatenate([before, self.lengths[prompt : prompt + 1], after])

    @cached_property
    def by_size(self) -> list[tuple[int, list[int]]]:
        """Prompts with their sequences, longest first; prompts with the most tokens first."""
        held: dict[int, list[int]] = {}
        for i in sorted(range(len(self.of)), key=lambda i: -self.n_tokens[i]):
            held.setdefault(self.of[i], []).append(i)

        def size(prompt: int) -> int:
            shared = int(self.lengths[prompt])
            return shared + sum(self.n_tokens[i] - shared for i in held[prompt])

        return sorted(held.items(), key=lambda item: (-size(item[0]), min(item[1])))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _filled(prompts: _Prompts, length: int, shapes: RowShapes) -> list[_Filled]:
    """Fill rows of at most `length` tokens, or longer for a longer sequence, with all sequences."""
    room = np.zeros(len(prompts.of), np.int64)
    rows = list[list[int]]()
    seen_rows, seen_prompts, n_seen = np.zeros_like(room), np.zeros_like(room), 0
    for prompt, sequences in prompts.by_size:
        shared = np.zeros(len(room), np.int64)  # of this prompt, in each row
        np.maximum.at(shared, seen_rows[:n_seen], prompts.in_common(prompt)[seen_prompts[:n_seen]])
        for i in sequences:
            added = prompts.n_tokens[i] - shared[: len(rows)]
            left = room[: len(rows)] - added
            row = _chosen(left, shared[: len(rows)])
            if row is None:
                row = len(rows)
                rows.append([])
                room[row] = max(length, shapes.fitting(prompts.n_tokens[i]))
                added = np.full(row + 1, prompts.n_tokens[i])
            if shared[row] < prompts.lengths[prompt] or not rows[row]:
                seen_rows[n_seen], seen_prompts[n_seen] = row, prompt
                n_seen += 1
            rows[row].append(i)
            room[row] -= added[row]
            shared[row] = prompts.lengths[prompt]
    return [_laid_out(row, prompts, shapes) for row in rows]


def _chosen(left: np.ndarray, shared: np.ndarray) -> int | None:
    """Choose the row with the longest shared prefix, then with the least room left; None if none has enough room."""
    fits = np.flatnonzero(left >= 0)
    return int(fits[np.lexsort((left[fits], -shared[fits]))[0]]) if len(fits) else None


def _laid_out(row: Sequence[int], prompts: _Prompts, shapes: RowShapes) -> _Filled:
    in_order = sorted(row, key=lambda i: (prompts.of[i], i))
    columns, end, before = list[np.ndarray](), 0, None
    for i in in_order:
        shared = 0 if before is None else int(prompts.in_common(prompts.of[i])[prompts.of[before]])
        own = np.arange(end, end + prompts.n_tokens[i] - shared)
        columns.append(own if before is None else np.concatenate([columns[-1][:shared], own]))
        end, before = end + len(own), i
    return _Filled(shapes.fitting(end), tuple(in_order), tuple(columns))


def _cost(rows: Sequence[_Filled], shapes: RowShapes) -> float:
    """Estimate the cost of the rows, in units of a token without attention."""
    lengths = [row.length for row in rows]
    n = {length: -(-lengths.count(length) // shapes.shards) * shapes.shards for length in sorted(set(lengths))}
    return sum(count * length * (1 + length / _EVEN_LENGTH) for length, count in n.items())


def _micro_batches(rows: Sequence[_Filled], shapes: RowShapes) -> list[MicroBatch]:
    made = list[MicroBatch]()
    for length in sorted({row.length for row in rows}, reverse=True):
        its = [row for row in rows if row.length == length]
        while its:
            n = next((n for n in shapes.at_once(length) if n <= len(its)), shapes.shards)
            places = [
                SequencePlace(sequence, number, columns)
                for number, row in enumerate(its[:n])
                for sequence, columns in zip(row.sequences, row.columns, strict=True)
            ]
            made.append(MicroBatch((n, length), tuple(places), packed=True))
            its = its[n:]
    return made
