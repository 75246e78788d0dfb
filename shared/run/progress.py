"""Finished tickets of a lineage of checkpoints: the queue's part of a checkpoint.

Invariants: every ticket up to `low` is finished; `done` holds the finished ones above it; `low + 1` is never in `done`;
finished = trained + void.
"""

from __future__ import annotations

from collections.abc import Iterable


class TicketProgress:
    """Compact set of finished tickets.

    Args:
        low: every ticket from 1 to `low` is finished.
        done: finished tickets above `low`.
        void: number of finished tickets that ended without training.
    """

    def __init__(self, low: int = 0, done: Iterable[int] = (), void: int = 0) -> None:
        self.low = low
        self.done = {ticket for ticket in done if ticket > low}
        self.void = void
        self._advance()

    @property
    def n_trained(self) -> int:
        return self.low + len(self.done) - self.void

    def is_finished(self, ticket: int) -> bool:
        return ticket <= self.low or ticket in self.done

    def finish(self, ticket: int, *, void: bool = False) -> bool:
        """Mark a ticket finished (`void`: without training); return False, unchanged, if it was finished before."""
        if self.is_finished(ticket):
            return False
        self.done.add(ticket)
        self.void += void
        self._advance()
        return True

    def reopen(self, ticket: int) -> None:
        """Undo `finish` of a trained ticket."""
        if ticket <= self.low:
            self.done.update(range(ticket + 1, self.low + 1))
            self.low = ticket - 1
        self.done.discard(ticket)

    def _advance(self) -> None:
        while self.low + 1 in self.done:
            self.low += 1
            self.done.remove(self.low)
