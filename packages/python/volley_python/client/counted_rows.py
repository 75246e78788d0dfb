"""Lines of a run's file that count, kept in order while lines are added and the head moves on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shared.run.state import TrainerState

type Row = Mapping[str, Any]
type Selection = Callable[[Iterable[Row], TrainerState | None], Iterable[Row]]


class CountedRows:
    """The last line of each step and environment among those that count, by step.

    While the head moves on within one lineage, a line that counts stays one, so only the others are examined again.

    Args:
        counting: selects the lines that count for a head (shared.run.counted).
    """

    def __init__(self, counting: Selection) -> None:
        self._counting = counting
        self._read, self._waiting = list[Row](), list[int]()
        self.restart()

    def __len__(self) -> int:
        return len(self._read)

    def restart(self) -> None:
        """Forget all lines."""
        self._read.clear()
        self._count_again()

    def _count_again(self) -> None:
        self._head: TrainerState | None = None
        self._waiting = [*range(len(self._read))]
        self._keys, self._rows, self._places = list[tuple[int, str]](), list[Row](), list[int]()

    def add(self, rows: Sequence[Row]) -> None:
        """Append lines of the file."""
        self._waiting += range(len(self._read), len(self._read) + len(rows))
        self._read += rows

    def of(self, head: TrainerState | None) -> Sequence[Row]:
        """Return the lines that count for a head; all lines without one."""
        if not _continues(self._head, head):
            self._count_again()
        self._head = head
        counting = {id(row) for row in self._counting([self._read[place] for place in self._waiting], head)}
        for place in self._waiting:
            if id(self._read[place]) in counting:
                self._place(place, self._read[place])
        self._waiting = [place for place in self._waiting if id(self._read[place]) not in counting]
        return tuple(self._rows)

    def _place(self, place: int, row: Row) -> None:
        if not isinstance(step := row.get("step"), int):
            return
        key = step, str(row.get("env") or "")
        i = bisect_left(self._keys, key) if self._keys and key <= self._keys[-1] else len(self._keys)
        if i == len(self._keys) or self._keys[i] != key:
            self._keys.insert(i, key)
            self._rows.insert(i, row)
            self._places.insert(i, place)
        elif place > self._places[i]:
            self._rows[i], self._places[i] = row, place


def _continues(before: TrainerState | None, head: TrainerState | None) -> bool:
    """True if every line that counts for `before` counts for `head`."""
    if before is None or head is None:
        return before is head
    return before.lineage == head.lineage and before.step <= head.step


def counted_rows(rows: Sequence[Row], counting: Selection, head: TrainerState | None) -> Sequence[Row]:
    """Return those of `rows` that count, as `CountedRows` does."""
    counted = CountedRows(counting)
    counted.add(rows)
    return counted.of(head)
