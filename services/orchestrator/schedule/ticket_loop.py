"""Ticket loop: reserve, generate the group, publish, for a limited number of groups at once.

Invariants
- A lease holds a ticket while its group is worked on. In any case the ticket is published or given back, or its lease
  expires and another producer gets it. Nothing is lost when Redis, the trainer or this process fails.
- Only the queue throttles generation: no ticket, no group.
- Groups for steps after the next one to be measured are published only when its weights are held (`publishable_step`).
  While they wait, earlier tickets that are issued again are still worked on.
- A group needs weights that are fresh enough for the step that will train it, so that it is not stale on arrival. This
  bound falls with the queue's version: after a rollback the trainer may wait for exactly this group.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from services.orchestrator import metrics
from services.orchestrator.episodes.partials import PartialRollouts
from services.orchestrator.schedule.failure_judge import FailureJudge, OnlyEnvironment, SetsAside
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.policy import GenerationPolicy
from services.orchestrator.schedule.rounds import RoundAdmission
from services.orchestrator.servers.balancer import VersionBounds
from services.orchestrator.status import RunStatus
from shared.errors import QueueUnavailable
from shared.process import telemetry, tracing
from shared.queue.records import Published, PublishRefusal, QueueState, Reservation
from shared.run.wedge import Wait
from shared.types import Group

_RESERVE_WAIT_S, _SHORT_WAIT_S = 2.0, 0.25
_RETRY_S, _RETRY_CAP_S = 0.1, 1.0
_GIVE_BACK_S, _LATE_S = 2.0, 0.5
_ROUND_POLL_S = 0.05
_log = telemetry.Log("tickets")

_WAITING = {
    PublishRefusal.NOT_READY: Wait("trainer", "the trainer has not opened the queue"),
    PublishRefusal.FULL: Wait("trainer", "the trainer has enough groups and has not finished a step yet"),
    PublishRefusal.EXHAUSTED: Wait("trainer", "all groups are generated, the trainer is finishing"),
}

_BEFORE_EVALUATION = Wait("trainer", "the next weights are measured before groups are made for later steps")


class TicketSource(Protocol):
    """The producer's part of `TicketQueue`."""

    async def reserve_wait(
        self,
        ttl_s: float,
        batch: int,
        max_staleness: int,
        total: int,
        deadline_s: float,
        ahead: int | None = None,
    ) -> Reservation | PublishRefusal: ...

    async def renew(self, ticket: int, ttl_s: float) -> bool: ...

    async def publish(self, ticket: int, payload: bytes) -> Published: ...

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

        It never needs newer weights than the durable ones, so the bound can always be met: all servers get durable
        weights.
        """
        if self.round is not None:
            return VersionBounds(min_step=reservation.version)
        trained_at = max(reservation.version, (reservation.ticket - void - 1) // self.batch)
        return VersionBounds(min_step=max(0, min(reservation.version, trained_at - self.max_staleness)))


type RunGroup = Callable[[int, VersionBounds], Awaitable[Group]]


class TicketLoop:
    """Loop over tickets.

    Args:
        n_groups: number of groups at once.
        run_group: makes the group of a ticket (also a failed one).
        mixture: reacts to environments that only fail.
        policy: decides which complete groups are sent to be trained.
        partials: keeps the episodes of tickets that are given back when this process stops.

    `last_step` limits the step that groups are made for, `publishable_step` the one that groups are published
    for; None for no limit.
    """

    def __init__(
        self,
        queue: TicketSource,
        gate: ReservationGate,
        status: RunStatus,
        terms: Admission,
        *,
        n_groups: int,
        run_group: RunGroup,
        mixture: SetsAside | None = None,
        policy: GenerationPolicy | None = None,
        partials: PartialRollouts | None = None,
    ) -> None:
        self._partials = partials or PartialRollouts(None)
        self._queue, self._gate, self._status = queue, gate, status
        self._judge = FailureJudge(status, mixture or OnlyEnvironment())
        self._terms, self._run_group, self._policy = terms, run_group, policy or GenerationPolicy()
        self._n_groups, self._slots = n_groups, asyncio.Semaphore(n_groups)
        self._rounds = None if terms.round is None else RoundAdmission(terms.round, terms.batch)
        self._held: dict[int, VersionBounds] = {}
        self._void = 0
        self._bound_changed = asyncio.Event()
        self._publishable_step: int | None = None
        self._n_waiting = 0
        self.last_step: int | None = None

    async def run(self) -> None:
        """Work until cancelled; then give back the tickets in hand.

        Raises:
            VolleyError: an environment that the run needs only fails; it contains the last failure.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew_leases())
            try:
                while True:
                    await self._slots.acquire()
                    reservation = await self._reserve()
                    self._held[reservation.ticket] = need = self._terms.need(reservation, self._void)
                    group.create_task(self._work(reservation, need))
            finally:
                self._partials.stop()

    @property
    def publishable_step(self) -> int | None:
        return self._publishable_step

    @publishable_step.setter
    def publishable_step(self, step: int | None) -> None:
        self._publishable_step = step
        self._bound_changed.set()

    @property
    def held(self) -> tuple[int, ...]:
        """Tickets in hand."""
        return tuple(self._held)

    def saw(self, state: QueueState, held: Iterable[int]) -> None:
        """Apply a newer snapshot of the queue. Args: held: tickets that were in hand before it was taken."""
        self._void = state.void
        self._bound_changed.set()
        for need in (self._held[ticket] for ticket in held if ticket in self._held):
            need.lower(state.version)

    async def _reserve(self) -> Reservation:
        failures, was_refused = 0, False
        while True:
            if self._rounds is not None and not self._rounds.is_open and not was_refused:
                self._policy.starved(True)
                await self._round_due(self._rounds)
            self._policy.starved(not self._gate.is_open)
            await self._gate.passed()
            try:
                answer = await self._ask()
            except QueueUnavailable as error:
                self._status.waiting, failures = Wait("redis", str(error)), failures + 1
                await _pause(failures)
                continue
            failures = 0
            self._policy.starved(isinstance(answer, PublishRefusal))
            was_refused = was_refused or isinstance(answer, PublishRefusal)
            if isinstance(answer, PublishRefusal):
                is_bounded = answer is PublishRefusal.EXHAUSTED and self._total() < self._terms.total
                self._status.waiting = _BEFORE_EVALUATION if is_bounded else _WAITING[answer]
            elif self._gate.is_open:
                self._status.waiting = None
                if self._rounds is not None:
                    self._rounds.reserved(is_first=was_refused)
                return answer
            else:
                await self._give_back(answer.ticket)

    async def _round_due(self, rounds: RoundAdmission) -> None:
        """Wait until a round may start."""
        while True:
            try:
                if not self._held and rounds.open(await self._queue.state()):
                    return
            except QueueUnavailable as error:
                self._status.waiting = Wait("redis", str(error))
            await asyncio.sleep(_ROUND_POLL_S)

    async def _ask(self) -> Reservation | PublishRefusal:
        """Return the queue's next answer; give back a ticket that arrives after cancellation."""
        terms, limit = self._terms, self._total()
        total = limit + (0 if self._rounds is None else self._rounds.surplus(limit))
        wait_s = _RESERVE_WAIT_S if limit == terms.total and not self._policy.has_waiting else _SHORT_WAIT_S
        asking = asyncio.ensure_future(
            self._queue.reserve_wait(terms.lease_s, terms.batch, terms.max_staleness, total, wait_s, terms.ahead)
        )
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            await asyncio.wait([asking], timeout=_LATE_S)
            if (
                not asking.cancel()
                and asking.exception() is None
                and isinstance(answer := asking.result(), Reservation)
            ):
                await self._give_back(answer.ticket)
            await asyncio.wait([asking])
            raise

    def _total(self) -> int:
        """Return how many groups may be reserved by now, in the whole run: no new ones while enough wait."""
        terms = self._terms
        if self._n_waiting >= self._n_groups:
            return 0
        return terms.total if self.last_step is None else min(terms.total, self.last_step * terms.batch)

    async def _work(self, reservation: Reservation, need: VersionBounds) -> None:
        ticket, began, has_slot = reservation.ticket, time.monotonic(), True
        try:
            with tracing.span("ticket", {"volley.ticket": ticket}, place=tracing.of_ticket(ticket)) as span:
                with self._policy.ticket():
                    group = await self._run_group(ticket, need)
                    if group.rule is None:
                        self._judge.ended(group, began)
                    sent = await self._policy.judged(group)
                span.set({"volley.env": group.env, "volley.outcome": group.failure or sent.rule or "complete"})
                if not self._is_publishable(ticket):  # the trainer may need an earlier ticket again
                    self._slots.release()
                    has_slot = False
                    await self._publishable(ticket)
                with tracing.span("publish"):
                    await self._publish(sent, group, reservation)
        except asyncio.CancelledError:
            await self._give_back(ticket)
            raise
        finally:
            self._held.pop(ticket, None)
            if has_slot:
                self._slots.release()

    async def _publish(self, sent: Group, group: Group, reservation: Reservation) -> None:
        """Publish what is sent for the group, repeating until the queue answers, for up to `patience_s`.

        Then its lease may expire.
        """
        payload, deadline, failures = sent.encode(), time.monotonic() + self._terms.patience_s, 0
        while time.monotonic() < deadline:
            try:
                outcome = await self._queue.publish(group.ticket, payload)
            except QueueUnavailable as error:
                _log.warning("publish failed", ticket=group.ticket, error=str(error))
            else:
                if outcome is not Published.NOT_READY:
                    self._published(sent, group, outcome, reservation.version)
                    await self._partials.forget(group.ticket)
                    return
            failures += 1
            await _pause(failures)
        metrics.GROUPS.labels("abandoned").inc()
        _log.error("group abandoned", ticket=group.ticket, waited_s=self._terms.patience_s)

    def _is_publishable(self, ticket: int) -> bool:
        """True if no step after the publishable one could be trained with the group.

        Only published groups become void, so no ticket behind the waiting ones does: the sum is exact.
        """
        step = self._publishable_step
        return step is None or ticket - self._void <= step * self._terms.batch

    async def _publishable(self, ticket: int) -> None:
        self._n_waiting += 1
        try:
            while not self._is_publishable(ticket):
                self._bound_changed.clear()
                await self._bound_changed.wait()
        finally:
            self._n_waiting -= 1

    def _published(self, sent: Group, group: Group, outcome: Published, version: int) -> None:
        outcome_name = "filtered" if sent.rule else "failed" if sent.failure is not None else outcome.value
        metrics.GROUPS.labels(outcome_name).inc()
        metrics.ENV_GROUPS.labels(self._status.by_env.label(group.env), outcome_name).inc()
        if outcome is Published.QUEUED:
            self._status.group_published(group, version)
        _log.debug("published", ticket=group.ticket, outcome=outcome.value, failure=sent.failure, rule=sent.rule)

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self._terms.lease_s / 3)
            try:
                for ticket in sorted(self._held):
                    await self._queue.renew(ticket, self._terms.lease_s)
            except QueueUnavailable as error:
                _log.warning("leases not renewed", error=str(error))

    async def _give_back(self, ticket: int) -> None:
        """Give a ticket back, best effort within a deadline; otherwise its lease expires."""
        with suppress(QueueUnavailable, TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_S):
                await self._queue.renew(ticket, 0)


async def _pause(failures: int) -> None:
    await asyncio.sleep(min(_RETRY_CAP_S, _RETRY_S * 2**failures) * random.uniform(0.5, 1.0))
