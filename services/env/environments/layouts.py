"""Tasks of a procedural environment: (split, index) → seed → layout, with training and evaluation apart by construction.

Two independent guarantees:
- seeds: the lowest bit of a task's seed is its split, so no seed serves both;
- layouts: a layout belongs to the split its own hash says, whatever seed, size or variant made it. The hash is that of the
  layout's smallest rotation or reflection, so an evaluation layout is not even a mirrored training layout.
Evaluation layouts, and on request training layouts, are also pairwise different. Nothing depends on process, time or Python's hash seed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from services.env.environments.base import EVAL, TRAIN, check_task
from shared.errors import InputError

type Rows = tuple[str, ...]

EVAL_SHARE = 4
"""One hash in so many is an evaluation layout."""

_MAX_DRAWS = 4096


@dataclass(frozen=True, slots=True)
class Drawn[L]:
    """A layout with the seed it came from and the digest (12 hex digits) of its canonical form."""

    layout: L
    seed: int
    digest: str


def canonical(rows: Rows) -> Rows:
    """The smallest of the layout's eight rotations and reflections."""
    forms: list[Rows] = []
    for _ in range(4):
        rows = tuple("".join(column) for column in zip(*rows[::-1], strict=True))
        forms += [rows, tuple(row[::-1] for row in rows)]
    return min(forms)


def digest_of(rows: Rows) -> str:
    return hashlib.blake2b("\n".join(canonical(rows)).encode(), digest_size=6).hexdigest()


def split_of(rows: Rows) -> str:
    """The only split this layout may be used in."""
    return EVAL if int(digest_of(rows), 16) % EVAL_SHARE == 0 else TRAIN


def seed_of(env: str, split: str, index: int, draw: int) -> int:
    """A 63-bit seed, even for training and odd for evaluation."""
    key = f"{env}/{split}/{index}/{draw}".encode()
    half = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 2
    return 2 * half + (split == EVAL)


class Layouts[L]:
    """The layouts of one procedural environment.

    Args:
        env: name that goes into the seeds and messages.
        make: seed → layout, or None when that seed gives no usable one.
        rows: layout → its text rows, which identify it.
        counts: tasks a split has.
        distinct_train: training layouts are pairwise different too; drawn in order, so the first use of a late one is slow.
    """

    def __init__(
        self, env: str, make: Callable[[int], L | None], rows: Callable[[L], Rows], counts: dict[str, int], *, distinct_train: bool = False
    ) -> None:
        self.counts = counts
        self._env, self._make, self._rows = env, make, rows
        self._distinct: dict[str, list[Drawn[L]]] = {EVAL: [], TRAIN: []} if distinct_train else {EVAL: []}
        self._seen: set[Rows] = set()
        self._lock = threading.Lock()
        self._train = lru_cache(maxsize=4096)(self._draw_train)

    def count(self, split: str) -> int:
        """Tasks of a split. Raises NotFound."""
        check_task(self._env, self.counts, split, 0)
        return self.counts[split]

    def get(self, split: str, index: int) -> Drawn[L]:
        """Raises NotFound, or InputError when the configuration has too few layouts."""
        check_task(self._env, self.counts, split, index)
        return self._get_distinct(split, index) if split in self._distinct else self._train(index)

    def _draw_train(self, index: int) -> Drawn[L]:
        return self._draw(TRAIN, index)

    def _get_distinct(self, split: str, index: int) -> Drawn[L]:
        known = self._distinct[split]
        with self._lock:
            while len(known) <= index:
                drawn = self._draw(split, len(known))
                self._seen.add(self._rows(drawn.layout))
                known.append(drawn)
            return known[index]

    def _draw(self, split: str, index: int) -> Drawn[L]:
        for draw in range(_MAX_DRAWS):
            seed = seed_of(self._env, split, index, draw)
            layout = self._make(seed)
            if layout is None:
                continue
            rows = self._rows(layout)
            if split_of(rows) == split and rows not in self._seen:
                return Drawn(layout, seed, digest_of(rows))
        raise InputError(
            f"{self._env} found no {'new ' if split in self._distinct else ''}layout for {split} task {index} in {_MAX_DRAWS} draws",
            f"its configuration allows too few: make the board larger, or lower {split}_tasks",
        )
