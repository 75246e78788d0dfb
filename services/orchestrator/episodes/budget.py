"""Attempt budget of one sample: failures cost an attempt, outages only time; an attempt repeats the sampled turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.orchestrator import metrics
from shared.clients.rollout import Generation
from shared.errors import VolleyError

_MOST_OUTAGES = 10
"""Most outages that a sample meets without getting further: its own request or action may be what ends the service."""


@dataclass(slots=True)
class SampledTurn:
    """Parts that were sampled in a turn, and a digest of the ids before it; `stored_parts` of them are on disk."""

    before: bytes
    parts: list[Generation] = field(default_factory=list[Generation])
    stored_parts: int = 0


@dataclass(slots=True)
class Outages:
    """Number of outages since the sample got further than ever before: `furthest` is a turn and its sampled tokens."""

    n: int = 0
    furthest: tuple[int, int] = (0, 0)

    def progressed(self, turn: int, n_sampled: int) -> None:
        """Reset the outage count if the sample has got further than ever before."""
        if (position := (turn, n_sampled)) > self.furthest:
            self.furthest, self.n = position, 0


@dataclass(slots=True)
class TokenBudget:
    """Attempts of one sample over all its turns and restarts: the only retry limit, so that retries are never nested.

    Of all attempts: `used` is the number that failed, `failures` counts failures by error class, `outages` are counted
    apart. `is_next_counted`: the next failure is the consequence of one that is counted already.

    Of the present attempt: `turn` is its turn (0 is the reset), `n_sampled` its number of sampled tokens, `reward` its
    reward before that turn, and `timer` its deadline.

    To be repeated by the next attempt: `sampled` are the turns sampled so far, `drawn` those of agents by their ids and
    draw.
    """

    max_attempts: int
    used: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])
    outages: Outages = field(default_factory=Outages)
    is_next_counted: bool = False
    turn: int = 0
    n_sampled: int = 0
    reward: float = 0.0
    timer: asyncio.Timeout | None = None
    sampled: list[SampledTurn] = field(default_factory=list[SampledTurn])
    drawn: dict[bytes, SampledTurn] = field(default_factory=dict[bytes, SampledTurn])

    def start_attempt(self) -> None:
        self.n_sampled, self.turn, self.reward = 0, 0, 0.0

    def progressed(self) -> None:
        """Reset the outage count if the sample has got further than ever before."""
        self.outages.progressed(self.turn, self.n_sampled)

    @property
    def is_used_up(self) -> bool:
        """True if no attempts are left."""
        return self.used >= self.max_attempts or self.outages.n >= _MOST_OUTAGES

    def count_failure(self, error: VolleyError, took_s: float = 0.0) -> None:
        """Count a failure; raise it again if it was the last attempt or cannot be retried.

        An outage costs no attempt, and extends the attempt's deadline by the seconds that the failed request took.
        """
        if self.is_next_counted:
            self.is_next_counted = False
            return
        if self.is_used_up:
            raise error
        self.record(error)
        if error.outage:
            self.outages.n += 1
            self._extend_deadline(took_s)
        else:
            self.used = self.used + 1 if error.transient else self.max_attempts
        if self.is_used_up:
            raise error

    def record(self, error: VolleyError) -> None:
        """Record a failure that may cost no attempt."""
        name = type(error).__name__
        self.failures[name] += 1
        metrics.FAILED_ATTEMPTS.labels(name).inc()
        metrics.FAILED_TOKENS.labels(name).observe(self.n_sampled)

    def _extend_deadline(self, seconds: float) -> None:
        if self.timer is not None and (due := self.timer.when()) is not None:
            _reschedule(self.timer, due + seconds)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Extend the attempt's deadline by the time spent inside, waiting for a service."""
        timer, due = self.timer, self.timer and self.timer.when()
        if timer is None or due is None or not _reschedule(timer, None):
            yield
            return
        started_at = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            _reschedule(timer, due + asyncio.get_running_loop().time() - started_at)


def _reschedule(timer: asyncio.Timeout, when: float | None) -> bool:
    """Reschedule a deadline; False if its attempt has ended (an agent's call may run longer)."""
    try:
        timer.reschedule(when)
    except RuntimeError:
        return False
    return True
