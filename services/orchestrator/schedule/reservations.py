"""Reservation of tickets: gates, rounds and queue outages delay it; callers only wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.leases import LeaseQueue, Leases
from services.orchestrator.schedule.policy import GenerationPolicy
from services.orchestrator.servers.balancer import VersionBounds
from services.orchestrator.status import RunStatus
from shared.errors import QueueUnavailable
from shared.queue.records import PublishRefusal, QueueState, Reservation
from shared.run.waits import Wait

_RESERVE_WAIT_S, _SHORT_WAIT_S = 2.0, 0.25
_RETRY_S, _RETRY_CAP_S = 0.1, 1.0
_LATE_S = 0.5
"""Wait for the answer to a request that was cancelled, in seconds."""
_ROUND_POLL_S = 0.05

_WAITING = {
    PublishRefusal.NOT_READY: Wait("trainer", "the trainer has not opened the queue"),
    PublishRefusal.FULL: Wait("trainer", "the trainer has enough groups and has not finished a step yet"),
    PublishRefusal.EXHAUSTED: Wait("trainer", "all groups are generated, the trainer is finishing"),
}

_BEFORE_EVALUATION = Wait("trainer", "the next weights are measured before groups are made for later steps")


class ReservationQueue(LeaseQueue, Protocol):
    """Methods of `TicketQueue` that reserve tickets."""

    async def reserve_wait(
        self,
        ttl_s: float,
        batch: int,
        max_staleness: int,
        total: int,
        deadline_s: float,
        ahead: int | None = None,
    ) -> Reservation | PublishRefusal: ...

    async def state(self) -> QueueState: ...


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission terms: groups per step, allowed staleness in steps, groups in the whole run, lease in seconds.

    `ahead` limits the groups beyond the durable steps further than the staleness does. `round` is the number of groups
    of a round, if each is sampled by the newest weights for one step and filtered (see `RoundAdmission`).
    """

    batch: int
    max_staleness: int
    total: int
    lease_s: float
    patience_s: float
    ahead: int | None = None
    round: int | None = None

    def need(self, reservation: Reservation, void: int) -> VersionBounds:
        """Return the weights for a ticket: at most `max_staleness` steps older than the step that trains it.

        The bound never exceeds the durable version, so every server can meet it.
        """
        if self.round is not None:
            return VersionBounds(min_step=reservation.version)
        trained_at = max(reservation.version, (reservation.ticket - void - 1) // self.batch)
        return VersionBounds(min_step=max(0, min(reservation.version, trained_at - self.max_staleness)))


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


class Reservations:
    """Reserves the tickets of a run, one after the other.

    Args:
        leases: tickets of this process; a round opens when there are none.
        limit: returns how many groups may be reserved by now, in the whole run.
    """

    def __init__(
        self,
        queue: ReservationQueue,
        gate: ReservationGate,
        status: RunStatus,
        terms: Admission,
        policy: GenerationPolicy,
        leases: Leases,
        limit: Callable[[], int],
    ) -> None:
        self._queue, self._gate, self._status, self._terms = queue, gate, status, terms
        self._policy, self._leases, self._limit = policy, leases, limit
        self._rounds = None if terms.round is None else RoundAdmission(terms.round, terms.batch)

    async def next(self) -> Reservation:
        """Reserve a ticket; only that or cancellation ends the call."""
        failures, was_refused = 0, False
        while True:
            if self._rounds is not None and not self._rounds.is_open and not was_refused:
                self._policy.set_starved(True)
                await self._wait_for_round(self._rounds)
            self._policy.set_starved(not self._gate.is_open)
            await self._gate.wait_open()
            try:
                answer = await self._request()
            except QueueUnavailable as error:
                self._status.waiting, failures = Wait("redis", str(error)), failures + 1
                await pause(failures)
                continue
            failures = 0
            self._policy.set_starved(isinstance(answer, PublishRefusal))
            if isinstance(answer, PublishRefusal):
                was_refused = True
                self._status.waiting = self._reason(answer)
            elif self._gate.is_open:
                self._status.waiting = None
                if self._rounds is not None:
                    self._rounds.reserved(is_first=was_refused)
                return answer
            else:  # the gate was closed while the queue answered
                await self._leases.give_back(answer.ticket)

    async def _wait_for_round(self, rounds: RoundAdmission) -> None:
        """Wait until a round may start."""
        while True:
            try:
                if not self._leases.tickets and rounds.open(await self._queue.state()):
                    return
            except QueueUnavailable as error:
                self._status.waiting = Wait("redis", str(error))
            await asyncio.sleep(_ROUND_POLL_S)

    def _reason(self, refusal: PublishRefusal) -> Wait:
        """Return what the run is waiting for."""
        is_bounded = refusal is PublishRefusal.EXHAUSTED and self._limit() < self._terms.total
        return _BEFORE_EVALUATION if is_bounded else _WAITING[refusal]

    async def _request(self) -> Reservation | PublishRefusal:
        """Send one request to the queue. If it is cancelled, a ticket that still arrives is given back."""
        terms, limit = self._terms, self._limit()
        total = limit + (0 if self._rounds is None else self._rounds.surplus(limit))
        wait_s = _RESERVE_WAIT_S if limit == terms.total and not self._policy.has_waiting else _SHORT_WAIT_S
        request = asyncio.ensure_future(
            self._queue.reserve_wait(terms.lease_s, terms.batch, terms.max_staleness, total, wait_s, terms.ahead)
        )
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            await self._give_back_late(request)
            raise

    async def _give_back_late(self, request: asyncio.Future[Reservation | PublishRefusal]) -> None:
        await asyncio.wait([request], timeout=_LATE_S)
        has_answer = not request.cancel() and request.exception() is None
        if has_answer and isinstance(answer := request.result(), Reservation):
            await self._leases.give_back(answer.ticket)
        await asyncio.wait([request])


async def pause(failures: int) -> None:
    """Sleep before the next request to a queue that failed so many times in a row."""
    await asyncio.sleep(min(_RETRY_CAP_S, _RETRY_S * 2**failures) * random.uniform(0.5, 1.0))
