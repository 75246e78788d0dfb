"""mixture.jsonl of one run: which environment a ticket plays, and changes from a ticket that nobody has reserved.

Invariants
- What a ticket plays is looked up after it is reserved, and never changes: a change holds the lock alone from the
  moment it learns which tickets are issued until its line is on disk, and whoever looks a ticket up waits for that. So
  a ticket that was reserved before is below the line, and one that was reserved since is looked up with it.
- What a crash left of a line was never in force, and is blanked before the next one is written.
- A file that is removed or cut while it is in use is written again: what tickets play follows from it.
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
    """Args:
    weights: in force from ticket 1, as configured.
    n_issued: how many tickets the queue has issued. May raise QueueUnavailable.
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
        """What a reserved ticket plays."""
        self._highest = max(self._highest, ticket)
        descriptor = locks.existing_lock_file(self._lock)
        if descriptor is None:  # nobody has begun to change the mixture since the ticket was reserved
            self._read()
            return self.assignment.of(ticket)
        async with locks.locked(descriptor, shared=True, poll_s=_POLL_S):
            self._read()
            return self.assignment.of(ticket)

    async def change(self, make: Callable[[MixtureChange], MixtureChange | None]) -> bool:
        """Puts another mixture in force, unless `make`, which is given the present one, says that nothing changes.

        From which ticket on is decided here. What was to play first and has not been reserved yet still plays first,
        unless it has left.

        Returns whether anything changed. Raises QueueUnavailable, StorageUnavailable, and DecodeError for what could
        not be read back; then nothing has.
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
        """What has been added to the file."""
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
            _log.error("a damaged line was left out: tickets may play others than before", reason=wrong)

    def _restore(self) -> None:
        """Writes the file as it was read; one that cannot be written now is written at the next look."""
        try:
            storage.replace(self._path, self._kept)
        except StorageUnavailable as error:
            _log.warning("the mixture's file is gone and cannot be written", reason=str(error))
        else:
            self._offset = len(self._kept)
            _log.warning("the mixture's file was gone and is written again", file=str(self._path))
