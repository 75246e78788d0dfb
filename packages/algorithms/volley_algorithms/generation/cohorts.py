"""Groups of tickets that wait for each other, to be compared or to advance together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Cohort[T]:
    """Gathers `n` members, or all open tickets when no other ticket is available.

    So no member waits forever at a limit of the queue or at the end of a run.

    Args:
        one_at_a_time: start only when every open ticket waits, so a cohort ends before the next one starts.
    """

    def __init__(self, n: int, *, one_at_a_time: bool = False) -> None:
        self.n, self._one_at_a_time = n, one_at_a_time
        self._open = 0
        self._starved = False
        self._waiting: list[tuple[T, asyncio.Future[Sequence[T]]]] = []

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def ticket(self) -> Iterator[None]:
        """Count a ticket as open: it may still join, or is in a cohort that has not ended."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._gather()

    def set_starved(self, is_starved: bool) -> None:
        """Record whether no ticket is available now."""
        self._starved = is_starved
        self._gather()

    async def join(self, member: T) -> Sequence[T]:
        """Wait for the others; return all members, in the order in which they joined."""
        entry = member, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        self._gather()
        try:
            return await entry[1]
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._gather()

    def _gather(self) -> None:
        n, all_wait = len(self._waiting), len(self._waiting) == self._open
        is_full = n >= self.n and (all_wait or not self._one_at_a_time)
        if n and (is_full or (self._starved and all_wait)):
            gathered, self._waiting = self._waiting[: self.n], self._waiting[self.n :]
            members = [member for member, _ in gathered]
            for _, future in gathered:
                if not future.done():
                    future.set_result(members)
