"""Leases of the tickets whose groups are being generated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from services.orchestrator.servers.balancer import VersionBounds
from shared.errors import QueueUnavailable
from shared.process import telemetry

_GIVE_BACK_S = 2.0
_log = telemetry.Log("leases")


class LeaseQueue(Protocol):
    """Methods of `TicketQueue` that leases need."""

    async def renew(self, ticket: int, ttl_s: float) -> bool: ...


class Leases:
    """Tickets of this process, each with the weights that its group needs. Args: lease_s: life of a lease."""

    def __init__(self, queue: LeaseQueue, lease_s: float) -> None:
        self._queue, self._lease_s = queue, lease_s
        self._needs: dict[int, VersionBounds] = {}

    @property
    def tickets(self) -> tuple[int, ...]:
        return tuple(self._needs)

    def add(self, ticket: int, need: VersionBounds) -> None:
        self._needs[ticket] = need

    def remove(self, ticket: int) -> None:
        self._needs.pop(ticket, None)

    def lower_needs(self, version: int, tickets: Iterable[int]) -> None:
        """Allow older weights for these groups: the durable version is `version`, after a rollback a lower one."""
        for need in (self._needs[ticket] for ticket in tickets if ticket in self._needs):
            need.lower(version)

    async def renew_until_cancelled(self) -> None:
        """Renew all leases, three times in the life of one."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                for ticket in sorted(self._needs):
                    await self._queue.renew(ticket, self._lease_s)
            except QueueUnavailable as error:
                _log.warning("leases not renewed", error=str(error))

    async def give_back(self, ticket: int) -> None:
        """Give a ticket back, best effort within a deadline; otherwise its lease expires."""
        with suppress(QueueUnavailable, TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_S):
                await self._queue.renew(ticket, 0)
