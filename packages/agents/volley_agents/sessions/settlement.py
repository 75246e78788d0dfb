"""Settle sessions when the trainer's ledger shows that their tickets have ended.

A ticket that ends untrained, or whose effect is undone, voids its sessions; their environments' episodes are deleted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import NamedTuple

from services.orchestrator.episodes.environments import EnvironmentCalls
from shared.clients.trainer import TrainerClient
from shared.errors import VolleyError
from shared.process import telemetry
from shared.run import ledger
from volley_agents.sessions import metrics
from volley_agents.sessions.session import AgentSession
from volley_agents.sessions.sessions import Sessions

_POLL_S = 2.0
_log = telemetry.Log("sessions")


class _LedgerEnd(NamedTuple):
    """The parts of a ledger line that are kept in memory."""

    epoch: int
    step: int
    disposition: str


class Dispositions:
    """Dispositions of tickets so far, from the lines of the ledger in their order."""

    def __init__(self) -> None:
        self._ended: dict[int, _LedgerEnd] = {}

    def add(self, text: str) -> None:
        """Read one line; others than those of a ledger are skipped."""
        one = ledger.parse(text.encode())
        if one is None:
            return
        if "rollback" in one:
            self._ended = {ticket: end for ticket, end in self._ended.items() if not _is_undone(end, one)}
            return
        known = self._ended.get(one["ticket"])
        if known is None or one["epoch"] >= known.epoch:
            self._ended[one["ticket"]] = _LedgerEnd(
                one["epoch"], one["step"], sys.intern(ledger.disposition_label(one))
            )

    def of(self, ticket: int) -> str | None:
        end = self._ended.get(ticket)
        return None if end is None else end.disposition


def _is_undone(end: _LedgerEnd, rollback: ledger.Line) -> bool:
    is_later = end.step > rollback["rollback"] and end.epoch < rollback["epoch"]
    return end.disposition == ledger.TRAINED and is_later


class SessionSettlement:
    """Settles the sessions of a run.

    Args:
        evaluated: returns the last step whose evaluation has ended; None if there is none.
    """

    def __init__(
        self,
        sessions: Sessions,
        trainer: TrainerClient,
        environments: EnvironmentCalls,
        evaluated: Callable[[], int | None],
    ) -> None:
        self._sessions, self._trainer, self._environments = sessions, trainer, environments
        self._evaluated, self._known, self._offset = evaluated, Dispositions(), 0
        self._run_id, self._alone = "", asyncio.Lock()

    async def watch(self) -> None:
        """Worker: settle sessions until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            if self._sessions.tickets():
                try:
                    await self.settle()
                except VolleyError as error:
                    _log.debug("sessions are not settled", reason=str(error))

    async def settle(self) -> None:
        """Settle the sessions of all tickets that have ended."""
        async with self._alone:
            await self._settle()

    async def _settle(self) -> None:
        await self._read()
        for ticket in self._sessions.tickets() - {0}:
            if (disposition := self._known.of(ticket)) is not None:
                await self._end(await self._sessions.settle(ticket, disposition))
                metrics.SESSIONS.labels("trained" if disposition == ledger.TRAINED else "void").inc()
        if (step := self._evaluated()) is not None:
            await self._end(await self._sessions.settle_evaluation(step))
        await self._sessions.prune()

    async def _read(self) -> None:
        """Read new lines of the ledger; a restarted run has another ledger."""
        if self._run_id != self._sessions.run_id:
            self._run_id, self._known, self._offset = self._sessions.run_id, Dispositions(), 0
        while True:
            lines, after = await self._trainer.record("ledger", self._offset)
            for line in lines:
                self._known.add(line)
            if after == self._offset:
                return
            self._offset = after

    async def _end(self, running: list[AgentSession]) -> None:
        """Delete the episodes of abandoned sessions, which ends their agents."""
        for session in running:
            await self._environments.delete(session.record.episode_id)
