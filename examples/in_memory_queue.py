"""Ticket queue of one process: gives the answers of `TicketQueue`, without Redis.

It survives no process. So a trainer that is replaced is fenced, but `deliveries` counts no crash of this process, and
leases follow the clock of this process.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from shared.errors import Fenced
from shared.queue.records import Finished, Published, PublishRefusal, QueueState, Reservation, StreamEntry
from shared.run.progress import TicketProgress
from shared.types import Lineage

_RETURNED = float("-inf")
"""Deadline of a ticket that was given back: it is issued again at once."""


class InMemoryQueue:
    """Queue of one run; methods as in `TicketQueue`. Args: clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress = TicketProgress()
        self._issued = self._version = self._void = self._epoch = 0
        self._is_open = False
        self._leases: dict[int, float] = {}
        self._entries: dict[int, StreamEntry] = {}
        self._read = set[int]()
        self._n_published = self._n_dead = 0
        self._counts = Counter[str]()
        self._lineage: Lineage = ()
        self._run_id = self._refused = ""
        self._changed = asyncio.Event()

    async def reserve(
        self, ttl_s: float, batch: int, max_staleness: int, total: int, ahead: int | None = None
    ) -> Reservation | PublishRefusal:
        """Reserve the lowest lost or expired ticket, else a new one."""
        if not self._is_open:
            return PublishRefusal.NOT_READY
        now, useful = self._clock(), self._issued - self._void
        most = (max_staleness + 1) * batch
        most = most if ahead is None else min(most, ahead)
        if lost := [ticket for ticket, deadline in self._leases.items() if deadline <= now]:
            ticket = min(lost)
            in_flight = len(self._entries) + len(self._leases) - len(lost)
            if in_flight >= most and ticket - self._progress.low - len(self._progress.done) > most:
                return PublishRefusal.FULL  # far more tickets are lost than may be in flight
            self._counts["reissued"] += 1
        elif useful >= total:
            return PublishRefusal.EXHAUSTED
        elif useful >= self._version * batch + most:
            return PublishRefusal.FULL
        else:
            ticket = self._issued = self._issued + 1
        self._leases[ticket] = now + ttl_s
        return Reservation(ticket, self._version)

    async def reserve_wait(
        self,
        ttl_s: float,
        batch: int,
        max_staleness: int,
        total: int,
        deadline_s: float,
        ahead: int | None = None,
    ) -> Reservation | PublishRefusal:
        """Reserve a ticket, waiting up to `deadline_s` seconds; return the last refusal if none became free."""
        end = self._clock() + deadline_s
        while True:
            answer = await self.reserve(ttl_s, batch, max_staleness, total, ahead)
            now = self._clock()
            if isinstance(answer, Reservation) or now >= end:
                return answer
            await self._wait(min([end, *self._leases.values()]) - now)

    async def renew(self, ticket: int, ttl_s: float) -> bool:
        """Extend a lease; 0 gives the ticket back. Returns False if the ticket is no longer awaited."""
        if ticket not in self._leases:
            return False
        self._leases[ticket] = self._clock() + ttl_s if ttl_s else _RETURNED
        self._changed.set()
        return True

    async def publish(self, ticket: int, payload: bytes) -> Published:
        """Queue the group of a ticket."""
        if not self._is_open:
            return Published.NOT_READY if ticket > 0 else Published.UNKNOWN
        if not 0 < ticket <= self._issued:
            self._counts["strays"] += ticket > 0
            return Published.UNKNOWN
        self._leases.pop(ticket, None)
        if self._progress.is_finished(ticket) or ticket in self._entries:
            self._counts["duplicates"] += 1
            return Published.DUPLICATE if ticket in self._entries else Published.DONE
        self._n_published += 1
        self._entries[ticket] = StreamEntry(f"{self._n_published}-0", ticket, payload, deliveries=1)
        self._changed.set()
        return Published.QUEUED

    async def begin(
        self, low: int, version: int, issued: int, void: int, done: Iterable[int], epoch: int, above: int = 0
    ) -> int:
        """Take over as trainer, with the state of a checkpoint; return the epoch. Closes the queue until `open`."""
        self._is_open = False
        if epoch == 0:  # no checkpoint: nothing here belongs to this lineage
            self._leases.clear()
            self._entries.clear()
            self._issued = 0
        self._progress = TicketProgress(low, done)
        self._issued = max(self._issued, issued, self._progress.low, *self._progress.done, 0)
        self._version, self._void, self._refused = version, void, ""
        self._epoch = max(self._epoch, epoch, above) + 1
        return self._epoch

    async def open(self, epoch: int, incarnations: Lineage = (), run_id: str = "") -> None:
        """Open the queue: finished tickets are removed, lost ones issued again, all others delivered again."""
        self._require_owner(epoch)
        self._read.clear()
        for ticket in [*self._leases, *self._entries]:
            if self._progress.is_finished(ticket):
                self._forget(ticket)
        known = self._leases.keys() | self._entries.keys()
        lost = {t for t in range(1, self._issued + 1) if t not in known and not self._progress.is_finished(t)}
        self._leases |= dict.fromkeys(lost, _RETURNED)
        self._lineage, self._run_id, self._is_open = incarnations or ((epoch, 0),), run_id, True
        self._changed.set()

    async def read(self, epoch: int, consumer: str, count: int, block_ms: int) -> list[StreamEntry]:
        """Read up to `count` groups in order of arrival; wait up to `block_ms` for the first one."""
        end = self._clock() + block_ms / 1000
        while True:
            self._require_owner(epoch)
            found = [entry for ticket, entry in self._entries.items() if ticket not in self._read][:count]
            if found or (left_s := end - self._clock()) <= 0:
                self._read |= {entry.ticket for entry in found}
                return found
            await self._wait(left_s)

    async def commit(self, epoch: int, version: int, finished: Sequence[Finished], void: int) -> None:
        """Record tickets whose effect is durable, and free capacity. Idempotent."""
        self._require_owner(epoch)
        for one in finished:
            self._forget(one.ticket)
            self._progress.finish(one.ticket)
        self._version, self._void = version, void
        self._changed.set()

    async def dead_letter(self, epoch: int, entry: StreamEntry, reason: str) -> None:
        """Count a poisoned entry; the ticket still has to be committed, as void."""
        self._require_owner(epoch)
        self._n_dead += 1

    async def leave(self, epoch: int, refused: str = "") -> None:
        """Stop in order. Args: refused: why the run trains no more."""
        self._require_owner(epoch)
        self._refused = refused or self._refused

    async def state(self) -> QueueState:
        """Return a snapshot."""
        return QueueState(
            issued=self._issued,
            low=self._progress.low,
            version=self._version,
            epoch=self._epoch,
            ready=self._is_open,
            void=self._void,
            depth=len(self._entries),
            leased=len(self._leases),
            done=len(self._progress.done),
            dead=self._n_dead,
            reissued=self._counts["reissued"],
            duplicates=self._counts["duplicates"],
            strays=self._counts["strays"],
            refused=self._refused,
            lineage=self._lineage,
            beginning=self._run_id,
        )

    def _require_owner(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise Fenced(f"epoch {epoch} is not the newest, {self._epoch} has started", "call begin first")

    def _forget(self, ticket: int) -> None:
        self._leases.pop(ticket, None)
        self._entries.pop(ticket, None)
        self._read.discard(ticket)

    async def _wait(self, seconds: float) -> None:
        """Wait for a change of the queue, at most so long."""
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._changed.wait()
        except TimeoutError:
            return
