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
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from services.orchestrator import metrics
from services.orchestrator.episodes.partials import PartialRollouts
from services.orchestrator.schedule.failure_monitor import EnvironmentSuspender, FailureMonitor, OnlyEnvironment
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.leases import Leases
from services.orchestrator.schedule.policy import EveryGroup, GenerationPolicy
from services.orchestrator.schedule.reservations import Admission, ReservationQueue, Reservations, pause
from services.orchestrator.servers.balancer import VersionBounds
from services.orchestrator.status import RunStatus
from shared.errors import QueueUnavailable
from shared.process import telemetry, tracing
from shared.queue.records import Published, QueueState, Reservation
from shared.types import Group

_log = telemetry.Log("tickets")


class TicketSource(ReservationQueue, Protocol):
    """The producer's part of `TicketQueue`."""

    async def publish(self, ticket: int, payload: bytes) -> Published: ...


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
        mixture: EnvironmentSuspender | None = None,
        policy: GenerationPolicy | None = None,
        partials: PartialRollouts | None = None,
    ) -> None:
        self._queue, self._status, self._terms = queue, status, terms
        self._run_group, self._policy = run_group, policy or EveryGroup()
        self._failures = FailureMonitor(status, mixture or OnlyEnvironment())
        self._partials = partials or PartialRollouts(None)
        self._leases = Leases(queue, terms.lease_s)
        self._reservations = Reservations(queue, gate, status, terms, self._policy, self._leases, self._limit)
        self._n_groups, self._slots = n_groups, asyncio.Semaphore(n_groups)
        self._void = 0
        self._bound_changed = asyncio.Event()
        self._publishable_step: int | None = None
        self._n_waiting = 0
        self.last_step: int | None = None

    async def run(self) -> None:
        """Work until cancelled; then give back the leased tickets.

        Raises:
            VolleyError: an environment that the run needs only fails; it contains the last failure.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._leases.renew_until_cancelled())
            try:
                while True:
                    await self._slots.acquire()
                    reservation = await self._reservations.next()
                    need = self._terms.need(reservation, self._void)
                    self._leases.add(reservation.ticket, need)
                    group.create_task(self._run_ticket(reservation, need))
            finally:
                self._partials.stop()

    @property
    def publishable_step(self) -> int | None:
        return self._publishable_step

    @publishable_step.setter
    def publishable_step(self, step: int | None) -> None:
        self._publishable_step = step
        self._bound_changed.set()

    def lacks_groups(self, state: QueueState) -> bool:
        """True if the queue has too few groups for the trainer's next step."""
        return state.depth < self._terms.batch

    @property
    def leased(self) -> tuple[int, ...]:
        """Tickets whose groups are being made or wait to be published."""
        return self._leases.tickets

    def update_queue_state(self, state: QueueState, leased: Iterable[int]) -> None:
        """Apply a newer snapshot of the queue. Args: leased: tickets leased before it was taken."""
        self._void = state.void
        self._bound_changed.set()
        self._leases.lower_needs(state.version, leased)

    def _limit(self) -> int:
        """Return how many groups of the run may be reserved by now; 0 while enough groups wait to be published."""
        terms = self._terms
        if self._n_waiting >= self._n_groups:
            return 0
        return terms.total if self.last_step is None else min(terms.total, self.last_step * terms.batch)

    async def _run_ticket(self, reservation: Reservation, need: VersionBounds) -> None:
        """Generate the group of a ticket and publish it. If this is cancelled, give the ticket back."""
        ticket, has_slot = reservation.ticket, True
        try:
            with tracing.span("ticket", {"volley.ticket": ticket}, place=tracing.of_ticket(ticket)) as span:
                group, sent = await self._generate(ticket, need)
                span.set({"volley.env": group.env, "volley.outcome": group.failure or sent.rule or "complete"})
                if not self._is_publishable(ticket):  # the trainer may need an earlier ticket again
                    self._slots.release()
                    has_slot = False
                    await self._wait_until_publishable(ticket)
                with tracing.span("publish"):
                    await self._publish(sent, group, reservation)
        except asyncio.CancelledError:
            await self._leases.give_back(ticket)
            raise
        finally:
            self._leases.remove(ticket)
            if has_slot:
                self._slots.release()

    async def _generate(self, ticket: int, need: VersionBounds) -> tuple[Group, Group]:
        """Return the group of a ticket, and the one to send: the same, or a rejected one without episodes."""
        started_at = time.monotonic()
        with self._policy.ticket():
            group = await self._run_group(ticket, need)
            if group.rule is None:
                self._failures.count(group, started_at)
            return group, await self._policy.filter_group(group)

    def _is_publishable(self, ticket: int) -> bool:
        """True if the group can only be trained by steps up to `publishable_step`.

        Only published groups become void, so no ticket behind the waiting ones does: the sum is exact.
        """
        step = self._publishable_step
        return step is None or ticket - self._void <= step * self._terms.batch

    async def _wait_until_publishable(self, ticket: int) -> None:
        self._n_waiting += 1
        try:
            while not self._is_publishable(ticket):
                self._bound_changed.clear()
                await self._bound_changed.wait()
        finally:
            self._n_waiting -= 1

    async def _publish(self, sent: Group, group: Group, reservation: Reservation) -> None:
        """Publish what is sent for the group; retry for up to `patience_s`, until the queue answers.

        After that the group is abandoned, and the ticket is issued again once its lease expires.
        """
        payload, deadline, failures = sent.encode(), time.monotonic() + self._terms.patience_s, 0
        while time.monotonic() < deadline:
            try:
                outcome = await self._queue.publish(group.ticket, payload)
            except QueueUnavailable as error:
                _log.warning("publish failed", ticket=group.ticket, error=str(error))
            else:
                if outcome is not Published.NOT_READY:
                    self._report(sent, group, outcome, reservation.version)
                    await self._partials.forget(group.ticket)
                    return
            failures += 1
            await pause(failures)
        metrics.GROUPS.labels("abandoned").inc()
        _log.error("group abandoned", ticket=group.ticket, waited_s=self._terms.patience_s)

    def _report(self, sent: Group, group: Group, outcome: Published, version: int) -> None:
        """Count a published group."""
        outcome_name = "filtered" if sent.rule else "failed" if sent.failure is not None else outcome.value
        metrics.GROUPS.labels(outcome_name).inc()
        metrics.ENV_GROUPS.labels(self._status.by_env.label(group.env), outcome_name).inc()
        if outcome is Published.QUEUED:
            self._status.group_published(group, version)
        _log.debug("published", ticket=group.ticket, outcome=outcome.value, failure=sent.failure, rule=sent.rule)
