"""Tasks of a procedural environment: (split, index) → seed → layout, with disjoint splits by construction.

Two independent guarantees:
- seeds: the lowest bit of a task's seed is its split, so no seed serves both;
- layouts: a layout belongs to the split given by its own hash, for any seed, size or variant. The hash is that of the
  layout's smallest rotation or reflection, so no evaluation layout is even a mirrored training layout. Tasks that are
  text (`form=as_it_is`) are hashed unchanged.

Evaluation layouts, and on request training layouts, are also pairwise different. Nothing depends on process, time or
Python's hash seed. Work is bounded in search steps, not in seconds: a call takes about MAX_EFFORT; time decides only
how many layouts a call draws ahead, never which. Memory is bounded: the seeds of drawn layouts are kept, and only a few
whole layouts.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from services.env.episode_types import EVAL, TRAIN, check_task
from shared.errors import InputError, RateLimited

type Rows = tuple[str, ...]

EVAL_SHARE = 4
"""Share of evaluation layouts: one hash in this many."""

MAX_DISTINCT = 10_000
"""Tasks of a split whose layouts are pairwise different."""

MAX_EFFORT = 200_000
"""Search steps of one call, about ten microseconds each; the next call continues from its results."""

DRAW_S = 8.0
"""Seconds after which a call draws no further layout; the next call continues. Drawing one may take a second."""

WAIT_S = 5.0
"""Seconds that a call waits for another one that draws."""

_MAX_DRAWS = 4096
_KEPT = 2048


@dataclass(frozen=True, slots=True)
class DrawnLayout[L]:
    """A layout with its seed and the digest (12 hex digits) of its canonical form."""

    layout: L
    seed: int
    digest: str


def canonical(rows: Rows) -> Rows:
    """Smallest of the layout's eight rotations and reflections."""
    forms: list[Rows] = []
    for _ in range(4):
        rows = tuple("".join(column) for column in zip(*rows[::-1], strict=True))
        forms += [rows, tuple(row[::-1] for row in rows)]
    return min(forms)


def identity_form(rows: Rows) -> Rows:
    """Form of a task that is text, which is equivalent only to itself."""
    return rows


def digest_of(rows: Rows, form: Callable[[Rows], Rows] = canonical) -> str:
    return hashlib.blake2b("\n".join(form(rows)).encode(), digest_size=6).hexdigest()


def split_of(rows: Rows, form: Callable[[Rows], Rows] = canonical) -> str:
    """The only split in which this layout may be used."""
    return EVAL if int(digest_of(rows, form), 16) % EVAL_SHARE == 0 else TRAIN


def seed_of(env: str, split: str, index: int, draw: int) -> int:
    """A 63-bit seed, even for training and odd for evaluation."""
    key = f"{env}/{split}/{index}/{draw}".encode()
    half = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 2
    return 2 * half + (split == EVAL)


@dataclass(slots=True)
class Effort:
    """Counter of search steps: cells of drawn maps, positions examined."""

    spent: int = 0

    def spend(self, n: int) -> None:
        self.spent += n

    @property
    def is_over(self) -> bool:
        return self.spent >= MAX_EFFORT


class Layouts[L]:
    """Layouts of one procedural environment.

    Args:
        env: name used in seeds and messages.
        make: seed → layout, or None if the seed gives no usable one; counts its steps. Each call bounds itself.
        rows: layout → text rows that identify it.
        counts: number of tasks of each split.
        advice: settings that make usable layouts more frequent.
        distinct_train: make training layouts pairwise different too. They are drawn in order, so the first use of a
        late one is slow.
        form: rows → representative of all rows of the same task.
    """

    def __init__(
        self,
        env: str,
        make: Callable[[int, Effort], L | None],
        rows: Callable[[L], Rows],
        counts: dict[str, int],
        *,
        distinct_train: bool = False,
        advice: str = "make the board larger",
        form: Callable[[Rows], Rows] = canonical,
    ) -> None:
        self.counts = counts
        self._env, self._make, self._rows, self._advice, self._form = env, make, rows, advice, form
        self._distinct: dict[str, list[int]] = {EVAL: [], TRAIN: []} if distinct_train else {EVAL: []}
        self._seen: set[bytes] = set()
        self._lock = threading.Lock()
        self._train = lru_cache(maxsize=_KEPT)(lambda index: self._draw(TRAIN, index, Effort()))
        self._fresh: dict[int, DrawnLayout[L]] = {}  # drawn ahead and not used yet, by seed
        self._made = lru_cache(maxsize=_KEPT)(self._remake)

    def count(self, split: str) -> int:
        """Number of tasks of a split. Raises NotFound."""
        check_task(self._env, self.counts, split, 0)
        return self.counts[split]

    def get(self, split: str, index: int) -> DrawnLayout[L]:
        """The layout of a task.

        Raises NotFound, InputError if the configuration has too few layouts, RateLimited if drawing continues with the
        next call.
        """
        check_task(self._env, self.counts, split, index)
        return self._made(self._distinct_seed(split, index)) if split in self._distinct else self._train(index)

    def _remake(self, seed: int) -> DrawnLayout[L]:
        if (drawn := self._fresh.pop(seed, None)) is not None:
            return drawn
        layout = self._make(seed, Effort())
        assert layout is not None, "this seed has given a layout before"
        return DrawnLayout(layout, seed, digest_of(self._rows(layout), self._form))

    def _distinct_seed(self, split: str, index: int) -> int:
        """Seed of a layout that differs from all earlier ones; they are drawn in order."""
        known, effort = self._distinct[split], Effort()
        if not self._lock.acquire(timeout=WAIT_S):
            raise self._later(split, index)
        try:
            until = time.monotonic() + DRAW_S
            while len(known) <= index:
                if effort.is_over or (effort.spent and time.monotonic() > until):
                    raise self._later(split, index)
                drawn = self._draw(split, len(known), Effort(), effort)
                self._seen.add(_identity(self._rows(drawn.layout)))
                if len(self._fresh) < _KEPT:
                    self._fresh[drawn.seed] = drawn
                known.append(drawn.seed)
            return known[index]
        finally:
            self._lock.release()

    def _draw(self, split: str, index: int, effort: Effort, of_call: Effort | None = None) -> DrawnLayout[L]:
        """Draw one layout.

        Args:
            effort: steps for this layout.
            of_call: steps of the whole call.
        """
        for draw in range(_MAX_DRAWS):
            seed, before = seed_of(self._env, split, index, draw), effort.spent
            layout = self._make(seed, effort)
            if of_call is not None:
                of_call.spend(effort.spent - before)
            rows = None if layout is None else self._rows(layout)
            if (
                layout is not None
                and rows is not None
                and split_of(rows, self._form) == split
                and _identity(rows) not in self._seen
            ):
                return DrawnLayout(layout, seed, digest_of(rows, self._form))
            if effort.is_over:
                raise self._too_few(split, index, draw + 1)
        raise self._too_few(split, index, _MAX_DRAWS)

    def _too_few(self, split: str, index: int, n_draws: int) -> InputError:
        new = "new " if split in self._distinct else ""
        return InputError(
            f"{self._env} found no {new}layout for {split} task {index} in {n_draws} draws",
            f"{self._advice}, or lower {split}_tasks: the settings allow too few layouts, or make them too rare",
        )

    def _later(self, split: str, index: int) -> RateLimited:
        return RateLimited(
            f"{self._env}: {len(self._distinct[split])} layouts are drawn so far, {split} task "
            f"{index} is not among them",
            f"try again, or lower {split}_tasks",
        )


def _identity(rows: Rows) -> bytes:
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=16).digest()
