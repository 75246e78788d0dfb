"""Rounds of groups whose episodes advance turn by turn, as GRL's synchronous multi-turn rollout."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from volley_algorithms.generation.cohorts import Cohort
from volley_algorithms.generation.lockstep import EpisodeBarrier


class Rounds:
    """A round has `n` groups of `group_size` episodes; the next one starts when all of its groups have ended."""

    def __init__(self, n: int, group_size: int) -> None:
        self.cohort = Cohort[int](n, one_at_a_time=True)
        self._group_size = group_size
        self._round: tuple[Sequence[int], EpisodeBarrier] | None = None

    @asynccontextmanager
    async def joined(self, ticket: int) -> AsyncIterator[EpisodeBarrier]:
        """Wait for the ticket's round; yield the barrier that its episodes share."""
        with self.cohort.ticket():
            tickets = await self.cohort.join(ticket)
            if self._round is None or self._round[0] is not tickets:
                self._round = tickets, EpisodeBarrier(len(tickets) * self._group_size)
            yield self._round[1]
