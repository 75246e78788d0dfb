"""Commit of steps and end of tickets: first in the log, then in the ledger, then in the queue.

Invariants: a step's record is durable before the ledger names its tickets, and the ledger durably says how a ticket
ended before the queue forgets it. Each ended ticket in a record has its line in the ledger or in the record itself: one
lock covers the decision in memory and its lines. A checkpoint has the state of its step's record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from services.trainer.groups.group_buffer import DroppedGroup, GroupBuffer, ReadyGroup
from services.trainer.loop.collaborators import Collaborators
from services.trainer.loop.pending import Line, PendingWork
from services.trainer.status import TrainerStatus
from services.trainer.step_log import FencedLog
from services.trainer.waiter import Waiter
from shared.errors import Unavailable
from shared.process import telemetry, tracing
from shared.queue.records import Finished
from shared.run import ledger
from shared.run.chain import Chain
from shared.run.folder import RunFolder
from shared.run.ledger import NONFINITE, TRAINED
from shared.run.protected_files import FollowedFiles, ProtectedFiles
from shared.run.state import TrainerState
from shared.types import WeightVersion

_log = telemetry.Log("settlement")


class Settlement:
    """Commits the steps and ends the tickets of one incarnation.

    Hold `exclusive` from the decision to drop groups until `drop` returns.

    Args:
        buffer: decides which groups are dropped, and marks tickets finished.
        state: durable state at the start of this incarnation.
        saved: the newest durable checkpoint, which has the weights of `state` or those of an ancestor.
        last_step: last step of the run.
    """

    def __init__(
        self,
        parts: Collaborators,
        buffer: GroupBuffer,
        status: TrainerStatus,
        waiter: Waiter,
        state: TrainerState,
        saved: WeightVersion,
        last_step: int,
    ) -> None:
        self._parts, self._buffer, self._status, self._waiter = parts, buffer, status, waiter
        self._metrics = FencedLog(parts.metrics, parts.archive, state.epoch)
        self._pending = PendingWork(state, saved)
        self._chain = state.chain
        self._last_step = last_step
        self._files = FollowedFiles(RunFolder(parts.archive.root.parent))
        self.exclusive = asyncio.Lock()

    @property
    def pending(self) -> PendingWork:
        return self._pending

    @contextmanager
    def unrecorded(self, tickets: Iterable[int]) -> Iterator[None]:
        """Mark these tickets as unrecorded while the body records them.

        If the body fails, they stay unrecorded, and this memory can no longer be saved as a checkpoint.
        """
        these = tuple(tickets)
        self._pending = self._pending.changed(these)
        yield
        self._pending = self._pending.recorded(these)

    async def record(
        self,
        groups: Sequence[ReadyGroup],
        digests: Sequence[str],
        version: WeightVersion,
        metrics: Line,
        checksum: str,
    ) -> None:
        """Record in log and ledger that a step made `version` from these groups.

        The groups are `unrecorded`, and in the archive under `digests`. Raises as `drop`.
        """
        lines = tuple(_line(g, TRAINED, version, digest) for g, digest in zip(groups, digests, strict=True))
        async with self.exclusive:
            self._require_recorded(self._pending.recorded(tuple(g.group.ticket for g in groups)).unrecorded)
            chain = self._chain.trained(lines, metrics)
            files = await asyncio.to_thread(self._files.now)
            state = self._after(version.step, lines, metrics, chain, files)
            await self._waiter.retry_until_stopped(
                lambda: asyncio.to_thread(self._parts.commits.append, state, checksum)
            )
            self._pending, self._chain = self._pending.committed(state, [g.finished for g in groups]), chain
            await self._write(lines)
            self._status.durable(version.step)

    async def settle(self, metrics: Line) -> None:
        """Report the step just recorded to metrics.jsonl, the sinks and the queue. Raises as `drop`."""
        await self._metrics.append(metrics)
        self._parts.sinks.send("step", metrics)
        async with self.exclusive:
            finished = self._pending.finished
            await self._commit(finished)
            self._pending = self._pending.settled()
        for _ in finished:
            self._status.ended(TRAINED)
        if await self._metrics.flush():
            self._pending = self._pending.flushed()

    def _after(
        self, step: int, lines: tuple[Line, ...], metrics: Line, chain: Chain, files: ProtectedFiles
    ) -> TrainerState:
        """State for the commit record of the step."""
        pending, buffer = self._pending, self._buffer
        return pending.state.at(
            step,
            buffer.progress,
            issued=max(pending.state.issued, buffer.highest),
            done=step == self._last_step,
            chain=chain,
            recent=lines,
            metrics=(*pending.metrics, metrics),
            files=files,
        )

    def _require_recorded(self, unrecorded: Sequence[Sequence[int]]) -> None:
        if unrecorded:
            tickets = ", ".join(str(ticket) for change in unrecorded for ticket in change)
            raise Unavailable(
                f"step {self._pending.version.step} cannot be saved: neither log nor ledger records tickets {tickets}",
                "free space on the run's disk; the next start resumes from the recorded steps",
            )

    async def drop(self, dropped: Sequence[DroppedGroup]) -> None:
        """End tickets without training, as the buffer decided while `exclusive` was held.

        Raises Fenced, and Unavailable after a stop.
        """
        assert self.exclusive.locked()
        if not dropped:
            return
        at = self._pending.version
        lines = [
            ledger.line(d.entry.ticket, d.reason, at, versions=d.versions, reason=d.detail, rule=d.rule)
            for d in dropped
        ]
        with self.unrecorded(d.entry.ticket for d in dropped):
            await self._write(lines)
            self._chain = self._chain.ended(lines)
        for one in dropped:
            await self._report_dropped(one)
        await self._commit([one.finished for one in dropped])

    async def refuse(
        self, groups: Sequence[ReadyGroup], digests: Sequence[str], at: WeightVersion, reason: str
    ) -> None:
        """End the tickets of a step that was refused and undone. Raises as `drop`."""
        async with self.exclusive:
            lines = [_line(g, NONFINITE, at, digest, reason) for g, digest in zip(groups, digests, strict=True)]
            await self._write(lines)
            self._chain = self._chain.ended(lines)
            self._buffer.progress.void += len(groups)
            await self._commit([g.finished for g in groups])
        for _ in groups:
            self._status.ended(NONFINITE)

    async def check_queue(self) -> None:
        """Check that this trainer still owns the queue, and give a wiped queue the durable step again.

        Ends no ticket. Raises as `drop`.
        """
        async with self.exclusive:
            await self._commit([])

    async def savable(self) -> TrainerState:
        """State for a checkpoint of the present weights. Raises Unavailable if they cannot be saved."""
        async with self.exclusive:  # not while tickets are being ended: those are unrecorded only briefly
            self._require_recorded(self._pending.unrecorded)
            return self._pending.state

    def saved(self, version: WeightVersion) -> None:
        """Note a durable checkpoint."""
        self._pending = replace(self._pending, saved=version)

    async def _report_dropped(self, dropped: DroppedGroup) -> None:
        ticket, reason, detail = dropped.entry.ticket, dropped.reason, dropped.detail
        self._status.ended(reason, dropped.rule)
        about = {"volley.outcome": reason, "volley.reason": detail}
        tracing.record("end without training", tracing.of_ticket(ticket), time.time(), attributes=about)
        log = _log.warning if dropped.is_defect or dropped.rule is None else _log.info
        log("ticket ended without training", ticket=ticket, reason=reason, rule=dropped.rule, detail=detail)
        if dropped.is_defect:
            await self._waiter.call_queue(
                lambda: self._parts.queue.dead_letter(self._pending.state.epoch, dropped.entry, dropped.detail)
            )

    async def _commit(self, finished: Sequence[Finished]) -> None:
        epoch, step, void = self._pending.version.epoch, self._pending.version.step, self._buffer.progress.void
        await self._waiter.call_queue(lambda: self._parts.queue.commit(epoch, step, finished, void))

    async def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        await self._waiter.retry_until_stopped(lambda: asyncio.to_thread(self._parts.ledger.append, lines))


def _line(
    group: ReadyGroup, disposition: str, at: WeightVersion, digest: str, reason: str | None = None
) -> dict[str, Any]:
    versions = group.oldest, group.newest
    return ledger.line(group.group.ticket, disposition, at, versions=versions, reason=reason, digest=digest)
