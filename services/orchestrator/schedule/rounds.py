"""Rounds of groups whose episodes advance turn by turn, as GRL's synchronous multi-turn rollout."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.orchestrator.episodes.lockstep import TurnBarrier
from services.orchestrator.schedule.cohorts import Cohort
from shared.queue.records import QueueState


class Rounds:
    """A round has `n` groups of `group_size` episodes; the next one starts when all of its groups have ended."""

    def __init__(self, n: int, group_size: int) -> None:
        self.cohort = Cohort[int](n, one_at_a_time=True)
        self._group_size = group_size
        self._round: tuple[Sequence[int], TurnBarrier] | None = None

    @asynccontextmanager
    async def joined(self, ticket: int) -> AsyncIterator[TurnBarrier]:
        """Wait for the ticket's round; yield the barrier that its episodes share."""
        with self.cohort.ticket():
            tickets = await self.cohort.join(ticket)
            if self._round is None or self._round[0] is not tickets:
                self._round = tickets, TurnBarrier(len(tickets) * self._group_size)
            yield self._round[1]


class RoundAdmission:
    """Opens rounds of `n` groups, of which a filter keeps the `batch` groups of one step.

    A round opens when no group is being made and the trainer has too few for its next step, so its tokens are sampled
    by the weights that the step changes.
    """

    def __init__(self, n: int, batch: int) -> None:
        self._n, self._batch = n, batch
        self._left, self._step, self._missing = 0, 0, 0

    @property
    def is_open(self) -> bool:
        """True if tickets of the present round are still to be reserved."""
        return self._left > 0

    def open(self, state: QueueState) -> bool:
        """Open a round, if the trainer needs one. Leased tickets will be issued again: this process holds none."""
        self._step = state.version + 1
        self._missing = self._step * self._batch - (state.issued - state.void - state.leased)
        self._left = self._n if self._missing > 0 else 0
        return self.is_open

    def reserved(self, *, is_first: bool) -> None:
        """Count a ticket.

        Args:
            is_first: the queue refused a ticket before it, so the groups before it went ahead as a round.
        """
        self._left = self._n - 1 if is_first else max(0, self._left - 1)

    def surplus(self, total: int) -> int:
        """Return how many groups may be reserved beyond `total` of the run, because the filter will reject them."""
        is_whole = self._missing >= self._batch and self._step * self._batch <= total
        return self._n - self._batch if is_whole else 0
