"""mixture.jsonl of one run: the environment of each ticket, and changes from an unreserved ticket on.

Invariants
- A ticket's environment is looked up after it is reserved, and never changes. A change holds an exclusive lock from
  before it reads which tickets are issued until its line is on disk, and look-ups wait for it. So a ticket reserved
  before is below the line, and one reserved since is looked up with it.
- An incomplete line left by a crash was never in force, and is blanked before the next one is written.
- A file that is removed or truncated while it is in use is rewritten: the tickets' environments follow from it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from shared.errors import StorageUnavailable
from shared.files import locks, storage
from shared.files.reading import ended_lines, open_file
from shared.process import telemetry
from shared.run.mixture import Drawn, MixtureChange, TicketAssignment, Weights, parse, replayed

_POLL_S = 0.02
_log = telemetry.Log("mixture")


class MixtureLog:
    """The mixture's log.

    Args:
        weights: in force from ticket 1, as configured.
        n_issued: returns how many tickets the queue has issued. May raise QueueUnavailable.
    """

    def __init__(self, path: Path, weights: Weights, n_issued: Callable[[], Awaitable[int]]) -> None:
        self._path, self._lock, self._n_issued = path, path.with_suffix(".lock"), n_issued
        self.assignment = TicketAssignment(weights)
        self._offset, self._kept, self._highest = 0, b"", 0
        self._read()

    @property
    def current(self) -> MixtureChange:
        return self.assignment.current

    async def drawn(self, ticket: int) -> Drawn:
        """Return the assignment of a reserved ticket."""
        self._highest = max(self._highest, ticket)
        descriptor = locks.existing_lock_file(self._lock)
        if descriptor is None:  # no change has started since the ticket was reserved
            self._read()
            return self.assignment.of(ticket)
        async with locks.locked(descriptor, shared=True, poll_s=_POLL_S):
            self._read()
            return self.assignment.of(ticket)

    async def counts(self) -> dict[str, int]:
        """Count the tickets of each environment that the queue has issued. Raises QueueUnavailable."""
        self._read()
        return self.assignment.counts(await self._n_issued())

    async def change(self, make: Callable[[MixtureChange], MixtureChange | None]) -> bool:
        """Put another mixture in force, unless `make`, called with the present one, returns None.

        The log decides the first ticket of the change. Environments that were to play first, and are not yet reserved,
        still play first, unless they have left.

        Returns True if anything changed. Raises QueueUnavailable, StorageUnavailable, and DecodeError for a change that
        could not be read back; then nothing has changed.
        """
        self._read()
        if make(self.current) is None:
            return False
        async with self._alone():
            self._read()
            last = self.current
            wanted = make(last)
            if wanted is None:
                return False
            begins = max(await self._n_issued() + 1, self._highest + 1, last.from_ticket)
            still = (e for e in last.first[begins - last.from_ticket :] if e in wanted.weights or e in wanted.suspended)
            first = tuple(dict.fromkeys((*still, *wanted.first)))
            change = replace(wanted, from_ticket=begins, first=first, at=round(time.time(), 3))
            line = change.encode()
            parse(line)
            await asyncio.to_thread(storage.append, self._path, line, durable=True)
            self._read()
        _log.info("mixture changed", from_ticket=begins, weights=dict(change.weights), why=change.why)
        return True

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        descriptor = await asyncio.to_thread(locks.lock_file, self._lock)
        async with locks.locked(descriptor, poll_s=_POLL_S):
            await asyncio.to_thread(storage.blank_torn_line, self._path)
            yield

    def _read(self) -> None:
        """Read lines added to the file."""
        try:
            with open_file(self._path) as file:
                is_cut = os.fstat(file.fileno()).st_size < self._offset
                file.seek(self._offset)
                lines = list(ended_lines(file))
        except FileNotFoundError:
            is_cut, lines = self._offset > 0, []
        if is_cut:
            self._restore()
            return
        self._offset += sum(size for size, _ in lines)
        self._kept += b"".join(line + b"\n" for _, line in lines)
        for wrong in replayed(self.assignment, (line for _, line in lines)):
            _log.error("skipped a damaged line: tickets may play other environments than before", reason=wrong)

    def _restore(self) -> None:
        """Rewrite the file as it was read; if that fails now, the next read tries again."""
        try:
            storage.replace(self._path, self._kept)
        except StorageUnavailable as error:
            _log.warning("the mixture's file is missing and cannot be written", reason=str(error))
        else:
            self._offset = len(self._kept)
            _log.warning("rewrote the mixture's missing file", file=str(self._path))
