"""Tasks of a procedural environment: (split, index) → seed → layout, with training and evaluation apart by construction.

Two independent guarantees:
- seeds: the lowest bit of a task's seed is its split, so no seed serves both;
- layouts: a layout belongs to the split its own hash says, whatever seed, size or variant made it. The hash is that of the
  layout's smallest rotation or reflection, so an evaluation layout is not even a mirrored training layout.
Evaluation layouts, and on request training layouts, are also pairwise different. Nothing depends on process, time or Python's hash
seed; only whether an answer comes does depend on time, since a call stops drawing after BUDGET_S. Memory is bounded: of a
layout that was drawn its seed is kept, and a few are kept whole.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from services.env.environments.base import EVAL, TRAIN, check_task
from shared.errors import InputError, Unavailable

type Rows = tuple[str, ...]

EVAL_SHARE = 4
"""One hash in so many is an evaluation layout."""

MAX_DISTINCT = 10_000
"""Tasks of a split whose layouts are pairwise different."""

BUDGET_S = 20.0
"""How long one call may draw; what it has found by then is kept for the next. Below the deadline of a call."""

_MAX_DRAWS = 4096
_KEPT = 1024


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
        self._distinct: dict[str, list[int]] = {EVAL: [], TRAIN: []} if distinct_train else {EVAL: []}
        self._seen: set[bytes] = set()
        self._lock = threading.Lock()
        self._train = lru_cache(maxsize=_KEPT)(lambda index: self._draw(TRAIN, index, time.monotonic() + BUDGET_S))
        self._made = lru_cache(maxsize=_KEPT)(self._make_again)

    def count(self, split: str) -> int:
        """Tasks of a split. Raises NotFound."""
        check_task(self._env, self.counts, split, 0)
        return self.counts[split]

    def get(self, split: str, index: int) -> Drawn[L]:
        """Raises NotFound, InputError when the configuration has too few layouts, Unavailable when drawing takes too long."""
        check_task(self._env, self.counts, split, index)
        return self._made(self._distinct_seed(split, index)) if split in self._distinct else self._train(index)

    def _make_again(self, seed: int) -> Drawn[L]:
        layout = self._make(seed)
        assert layout is not None, "this seed has given a layout before"
        return Drawn(layout, seed, digest_of(self._rows(layout)))

    def _distinct_seed(self, split: str, index: int) -> int:
        """The seed of a layout that differs from all before it; they are drawn in order."""
        known, until = self._distinct[split], time.monotonic() + BUDGET_S
        if not self._lock.acquire(timeout=BUDGET_S):
            raise self._too_slow(split, index)
        try:
            while len(known) <= index:
                drawn = self._draw(split, len(known), until)
                self._seen.add(_identity(self._rows(drawn.layout)))
                known.append(drawn.seed)
            return known[index]
        finally:
            self._lock.release()

    def _draw(self, split: str, index: int, until: float) -> Drawn[L]:
        for draw in range(_MAX_DRAWS):
            if time.monotonic() > until:
                raise self._too_slow(split, index)
            seed = seed_of(self._env, split, index, draw)
            layout = self._make(seed)
            if layout is None:
                continue
            rows = self._rows(layout)
            if split_of(rows) == split and _identity(rows) not in self._seen:
                return Drawn(layout, seed, digest_of(rows))
        raise InputError(
            f"{self._env} found no {'new ' if split in self._distinct else ''}layout for {split} task {index} in {_MAX_DRAWS} draws",
            f"its configuration allows too few: make the board larger, or lower {split}_tasks",
        )

    def _too_slow(self, split: str, index: int) -> Unavailable:
        return Unavailable(
            f"{self._env}: {split} task {index} was not found within {BUDGET_S:g} s",
            "ask again, or change its configuration so that more layouts qualify",
        )


def _identity(rows: Rows) -> bytes:
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=16).digest()
