"""Train-data queue: tickets on a Redis stream.

A ticket is a number (from 1) that serves as group id, dedupe key, staleness admission, backpressure credit and position
in the data. A producer reserves a ticket before it generates, and publishes the group under it; the trainer reads
groups, and commits tickets once a checkpoint that contains their effect is durable.

Invariants:
- A new ticket is issued only while issued - void < (version + max_staleness + 1) * batch, so no group is more than
  max_staleness steps old when it is trained, and the stream is bounded. (Void tickets ended without training.)
- Delivery is at least once; the effect of training is exactly once along the surviving lineage of checkpoints: steps
  after the last durable checkpoint are undone and repeated.
- Every issued ticket is finished, queued, leased, or in the pool of tickets to be issued again. `begin` and `open`
  restore this from a checkpoint alone, whatever the server has lost.
- Every write of a trainer carries its fence; a replaced trainer changes nothing and gets `Fenced`.
- Partial loss of the server's data is treated as total loss: every script checks that the keys are complete, and
  removes all of them otherwise. The trainer is then fenced, and the next one restores the queue.
- Leases use the queue's own clock, which never goes back and never jumps ahead with the server's.

No method repeats a command. After `QueueUnavailable` every method may be called again.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson
from redis.asyncio import Redis

from shared.errors import Fenced, QueueUnavailable
from shared.process import telemetry
from shared.queue.client import MAX_BLOCK_MS, command, transaction
from shared.queue.records import Finished, Published, PublishRefusal, QueueState, Reservation, StreamEntry
from shared.queue.scripts import Keys, Scripts
from shared.run.progress import TicketProgress
from shared.types import Lineage

__all__ = ["Finished", "PublishRefusal", "Published", "QueueState", "Reservation", "StreamEntry", "TicketQueue"]

_REFUSALS = {-1: PublishRefusal.NOT_READY, -2: PublishRefusal.FULL, -3: PublishRefusal.EXHAUSTED}
_CHUNK = 500  # tickets per script call
_DEAD_KEPT = 64
_NEW = ">"
_MAX_DIGITS = 16  # Lua's numbers are exact up to 2^53
_log = telemetry.Log("queue")


type _Row = tuple[bytes, dict[bytes, bytes] | None]  # entry id, fields


@dataclass
class _Lineage:
    """The trainer's view of its own incarnation.

    `held` are tickets given to the caller and not yet committed. `cursor` is the next position to read: `>` for new
    entries, or the entry id after which the trainer's own pending entries are read again.
    """

    epoch: int
    fence: str
    progress: TicketProgress
    version: int
    tries: dict[int, int] = field(default_factory=dict[int, int])
    held: set[int] = field(default_factory=set)
    cursor: str = "0"


@dataclass(frozen=True)
class _RedisReply:
    result: Reservation | PublishRefusal
    wake: int
    next_lease_ms: int  # until the next lease expires; -1 without leases


class TicketQueue:
    """Queue of one run. Producers use `reserve`, `renew`, `publish`; the one trainer `begin`, `open`, `read`, `commit`.

    Every method raises `QueueUnavailable` if the server does not answer, and may then be called again.
    """

    def __init__(self, redis: Redis, run: str) -> None:
        self.keys = Keys(run)
        self._redis = redis
        self._scripts = Scripts(redis, self.keys)
        self._lineage: _Lineage | None = None

    async def reserve(
        self, ttl_s: float, batch: int, max_staleness: int, total: int, ahead: int | None = None
    ) -> Reservation | PublishRefusal:
        """Reserve a ticket: the lowest lost or expired one, else a new one.

        Args:
            ttl_s: the lease, in seconds by the queue's clock; a ticket that is not published by then is issued again.
            batch: groups per step.
            max_staleness: allowed staleness in steps.
            total: groups to train in the whole run.
            ahead: largest number of groups beyond the durable steps; None for all that `max_staleness` allows.
        """
        return (await self._reserve(ttl_s, batch, max_staleness, total, ahead)).result

    async def reserve_wait(
        self,
        ttl_s: float,
        batch: int,
        max_staleness: int,
        total: int,
        deadline_s: float,
        ahead: int | None = None,
    ) -> Reservation | PublishRefusal:
        """Reserve a ticket, waiting up to `deadline_s` seconds; return the last refusal if none became free.

        Commits, a starting trainer and expiring leases wake it. It occupies one connection while it waits.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            answer = await self._reserve(ttl_s, batch, max_staleness, total, ahead)
            left_ms = int((end - loop.time()) * 1000)
            if isinstance(answer.result, Reservation) or left_ms <= 0:
                return answer.result
            until_lease = answer.next_lease_ms + 1 if answer.next_lease_ms >= 0 else MAX_BLOCK_MS
            block_ms = max(1, min(left_ms, until_lease, MAX_BLOCK_MS))
            await command(self._redis, "XREAD", "BLOCK", block_ms, "STREAMS", self.keys.wake, f"{answer.wake}-0")

    async def _reserve(
        self, ttl_s: float, batch: int, max_staleness: int, total: int, ahead: int | None
    ) -> _RedisReply:
        limit = "" if ahead is None else ahead
        row = await self._scripts.call("reserve", _ms(ttl_s), batch, max_staleness, total, limit)
        if row[0] < 0:
            return _RedisReply(_REFUSALS[row[0]], wake=row[2], next_lease_ms=row[3])
        return _RedisReply(Reservation(ticket=row[0], version=row[1]), wake=0, next_lease_ms=-1)

    async def renew(self, ticket: int, ttl_s: float) -> bool:
        """Extend the lease to `ttl_s` from now; 0 returns the ticket to the pool at once.

        Returns False if the ticket is no longer awaited (published, finished, or lost with the server's memory).
        """
        return bool(await self._scripts.call("renew", ticket, _ms(ttl_s)))

    async def publish(self, ticket: int, payload: bytes) -> Published:
        """Queue the group of a ticket. Publishing twice, late, or without a lease is harmless: one group counts."""
        if ticket < 1:
            return Published.UNKNOWN
        return Published((await self._scripts.call("publish", ticket, payload)).decode())

    async def begin(
        self, low: int, version: int, issued: int, void: int, done: Iterable[int], epoch: int, above: int = 0
    ) -> int:
        """Take over as trainer, with the state of a checkpoint.

        All earlier trainers are fenced, and the queue is closed until `open`, so that nobody uses a state that this
        trainer may still correct. If the trainer dies in between, the queue stays closed for the next one.

        Args:
            low, done, void: finished tickets (see `TicketProgress`).
            version: durable step.
            issued: highest ticket known to be issued.
            epoch: the checkpoint's epoch; 0 without a checkpoint, which also removes all groups of an earlier lineage.
            above: the highest epoch known to have started, including trainers that left no checkpoint.

        Returns:
            The epoch of this incarnation: the highest that checkpoint, server and caller know, plus 1.

        Raises:
            Fenced: yet another trainer has started meanwhile.
        """
        self._lineage = None
        progress = TicketProgress(low, done, void)
        row = await self._scripts.call("begin", secrets.token_hex(4), epoch, progress.low, version, issued, void, above)
        fence = row[1].decode()
        for chunk in itertools.batched(sorted(progress.done), _CHUNK):
            await self._scripts.fenced("begin_done", fence, chunk)
        self._lineage = _Lineage(epoch=int(row[0]), fence=fence, progress=progress, version=version)
        return self._lineage.epoch

    async def open(self, epoch: int, incarnations: Lineage = (), run_id: str = "") -> None:
        """Repair the queue in bounded pieces, and open it.

        Finished tickets are removed, lost ones will be issued again, all others are delivered again. May be repeated.
        Raises Fenced.

        Args:
            incarnations: the run's lineage, this epoch included; by default this epoch alone, from step 0.
            run_id: identifier of the run, which changes when it is restarted in an emptied folder.
        """
        lineage = self._owned(epoch)
        published = [orjson.dumps(incarnations or ((epoch, 0),)).decode(), run_id]
        while not await self._scripts.fenced("open_chunk", lineage.fence, [_CHUNK, *published]):
            pass
        counts = await command(self._redis, "HGETALL", self.keys.tries)
        lineage.tries.update({int(t): int(n) for t, n in counts.items() if t.isdigit() and n.isdigit()})

    async def read(self, epoch: int, consumer: str, count: int, block_ms: int) -> list[StreamEntry]:
        """Read up to `count` groups in order of arrival; each ticket at most once until it is committed.

        Waits up to `block_ms` (at most MAX_BLOCK_MS) for the first one. After a failed or cancelled call, the entries
        of its lost answer are returned again.

        Raises:
            Fenced: another trainer has started, or the server was wiped.
        """
        lineage = self._owned(epoch)
        try:
            while True:
                cursor = lineage.cursor
                rows = await self._fetch(lineage, consumer, count, block_ms)
                if cursor != _NEW:
                    lineage.cursor = rows[-1][0].decode() if rows else _NEW
                entries = await self._unseen(lineage, rows)
                if entries or cursor == _NEW:
                    return entries
        except BaseException:
            lineage.cursor = "0"
            raise

    async def _fetch(self, lineage: _Lineage, consumer: str, count: int, block_ms: int) -> Sequence[_Row]:
        block = ("BLOCK", min(block_ms, MAX_BLOCK_MS)) if block_ms > 0 else ()
        where = ("STREAMS", self.keys.stream, lineage.cursor)
        group = ("GROUP", f"t{lineage.fence}", consumer)
        answer = await command(self._redis, "XREADGROUP", *group, "COUNT", count, *block, *where)
        return answer[0][1] if answer else []

    async def _unseen(self, lineage: _Lineage, rows: Sequence[_Row]) -> list[StreamEntry]:
        """Return the entries that the caller neither holds nor has finished.

        If the server lost a commit, finished entries are committed again.
        """
        fresh: list[StreamEntry] = []
        again: list[Finished] = []
        for entry_id, fields in rows:
            if not fields:
                continue  # deleted while it was pending
            entry, ticket = entry_id.decode(), _ticket_of(fields)
            if ticket is None:
                _log.warning("removed an entry that no producer wrote", entry=entry)
                await self._remove(lineage, entry)
            elif lineage.progress.is_finished(ticket):
                again.append(Finished(ticket, entry))
            elif ticket not in lineage.held:
                fresh.append(StreamEntry(entry, ticket, fields[b"d"], deliveries=1 + lineage.tries.get(ticket, 0)))
        if again:
            await self._commit(lineage, again)
        lineage.held.update(entry.ticket for entry in fresh)
        return fresh

    async def _remove(self, lineage: _Lineage, entry: str) -> None:
        stream = self.keys.stream
        await transaction(self._redis, ("XACK", stream, f"t{lineage.fence}", entry), ("XDEL", stream, entry))

    async def commit(self, epoch: int, version: int, finished: Sequence[Finished], void: int) -> None:
        """Record tickets whose effect is durable, and free capacity. Idempotent.

        Call it only after the checkpoint that contains the effect is durable. Tickets that end without training may be
        committed before: if that commit is lost, they are issued again.

        Args:
            version: the durable step.
            finished: tickets that ended, trained or void.
            void: number of the lineage's tickets that ended without training, these included.

        Raises:
            Fenced: another trainer has started, or the server was wiped; nothing changed.
        """
        lineage = self._owned(epoch)
        for ticket in finished:
            lineage.progress.finish(ticket.ticket)
        if version != lineage.version:
            lineage.tries.clear()
        lineage.progress.void, lineage.version = void, version
        await self._commit(lineage, finished)

    async def _commit(self, lineage: _Lineage, finished: Sequence[Finished]) -> None:
        chunks = list(itertools.batched(finished, _CHUNK)) or [()]
        progress = lineage.progress
        for i, chunk in enumerate(chunks):
            last = i == len(chunks) - 1
            pairs = itertools.chain.from_iterable((f.ticket, f.entry_id or "") for f in chunk)
            header = (lineage.version, progress.void) if last else ("", "")
            await self._scripts.fenced("commit", lineage.fence, [*header, progress.low, *pairs])
        for ticket in finished:
            lineage.held.discard(ticket.ticket)
            lineage.tries.pop(ticket.ticket, None)

    async def dead_letter(self, epoch: int, entry: StreamEntry, reason: str) -> None:
        """Keep a copy of a poisoned entry for inspection; the ticket still has to be committed, as void.

        Raises:
            Fenced: another trainer has started.
        """
        lineage = self._owned(epoch)
        await self._scripts.fenced("dead_letter", lineage.fence, [entry.entry_id, entry.ticket, reason, _DEAD_KEPT])

    async def leave(self, epoch: int, refused: str = "") -> None:
        """Stop cleanly, so that groups read but not committed are not counted as crashes.

        Args:
            refused: why the run stopped training; `state` returns it until another trainer starts.

        Raises:
            Fenced: another trainer has started.
        """
        await self._scripts.fenced("leave", self._owned(epoch).fence, [refused])

    async def state(self) -> QueueState:
        """Return a consistent snapshot; zeros and not ready on a server without this run."""
        keys = self.keys
        raw, depth, leased, done, dead = await transaction(
            self._redis,
            ("HGETALL", keys.state),
            ("XLEN", keys.stream),
            ("ZCARD", keys.lease),
            ("SCARD", keys.done),
            ("XLEN", keys.dead),
        )
        names = ("issued", "low", "version", "epoch", "void", "reissued", "duplicates", "strays")
        try:
            counts = {name: int(raw.get(name.encode(), 0)) for name in names}
            lineage = tuple((epoch, step) for epoch, step in orjson.loads(raw.get(b"lineage", b"[]")))
        except (ValueError, TypeError) as error:
            raise QueueUnavailable(
                "the state of the queue in Redis is damaged", "the next trainer restores it"
            ) from error
        return QueueState(
            **counts,
            ready=raw.get(b"ready") == b"1",
            depth=depth,
            leased=leased,
            done=done,
            dead=dead,
            refused=raw.get(b"refused", b"").decode(errors="replace"),
            lineage=lineage,
            beginning=raw.get(b"beginning", b"").decode(errors="replace"),
        )

    def _owned(self, epoch: int) -> _Lineage:
        if self._lineage is None or self._lineage.epoch != epoch:
            raise Fenced(f"epoch {epoch} was not started here", "call begin first")
        return self._lineage


def _ticket_of(fields: Mapping[bytes, bytes]) -> int | None:
    """Return the ticket of an entry; None for an entry that was written by hand."""
    text = fields.get(b"t", b"")
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS and b"d" in fields else None


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
