"""One session: its state, its recorded calls, and those in progress.

Invariants
- States go `running → ended → trained | void`, or `running → void`; each change is on disk before anybody hears of it.
- A call is recorded with its turns in one transaction, before its first byte leaves. A repeated call gets the recorded
  answer; no call is recorded twice.
- A call that nobody waits for any more is given up, unless its record is being written.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from services.orchestrator import metrics
from services.orchestrator.episodes.turn import SamplingSpec, TokenBudget
from services.orchestrator.sessions.answers import RecordedCall
from services.orchestrator.sessions.draws import Draws
from services.orchestrator.sessions.failures import CallsUsedUp, SessionOver
from services.orchestrator.sessions.messages import Digest
from services.orchestrator.sessions.records import CallEntry, CallRequest, SessionRecord, SessionResult, State
from services.orchestrator.sessions.store import SessionStore, Statement
from services.orchestrator.sessions.tree import Node, Tree
from shared.errors import Conflict, RateLimited, Unavailable

MOST_AT_ONCE = 64
"""Calls of one session that may run at once."""
_PLAYER_S = 300.0
"""Longest wait of a call for a restarted orchestrator to take up its session's ticket."""
_UPDATE = "UPDATE sessions SET state = ?, reason = ?, result = ?, output = ? WHERE id = ?"

type Sample = Callable[[int], Awaitable[RecordedCall]]
"""Samples call number n; nothing of it is recorded yet."""
type Limit = Literal["turns", "context"]


@dataclass(frozen=True, slots=True)
class Player:
    """Sample that the session plays, and its attempts, in this process."""

    spec: SamplingSpec
    budget: TokenBudget


@dataclass(slots=True, eq=False)
class Flight:
    """A call in progress. `writing`: its record is being written, so it can no longer be given up."""

    request: CallRequest
    done: asyncio.Future[RecordedCall]
    task: asyncio.Task[None] | None = None
    waiters: int = 0
    writing: bool = False

    async def run(self, work: Coroutine[Any, Any, RecordedCall]) -> None:
        """Do the work of the call; its waiters get what it raises."""
        try:
            self.done.set_result(await work)
        except asyncio.CancelledError:
            self.done.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - each waiter gets it
            self.done.set_exception(error)
            self.done.exception()  # there may be no waiter left

    async def result(self) -> RecordedCall:
        """Wait for the answer; the last waiter that leaves ends the call. Raises what the call raised."""
        self.waiters += 1
        try:
            await asyncio.wait([self.done])
            if self.done.cancelled():
                raise Unavailable("the call was given up: the session or the recorder ends", "send it again")
            return self.done.result()
        finally:
            self.waiters -= 1
            if not self.waiters:
                self.give_up()

    def give_up(self) -> None:
        if self.task is not None and not self.writing:
            self.task.cancel()


@dataclass
class Session:
    """A session that is open, or was when this process started.

    `claimed` is the request that an external agent claimed it with, `output` what that agent sent at its end. `expires`
    is in seconds since 1970, `generate_s` the time spent sampling. `limit` is what refused the last call.
    `planned` are the most turns and tokens that each call in progress adds, by its number.
    """

    record: SessionRecord
    store: SessionStore
    max_calls: int
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    state: State = "running"
    reason: str = ""
    result: SessionResult | None = None
    claimed: str = ""
    output: str = ""
    expires: float = 0.0
    generate_s: float = 0.0
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tree: Tree = field(default_factory=Tree)
    draws: Draws = field(default_factory=Draws)
    server_url: str | None = None
    limit: Limit | None = None
    limit_at: float = 0.0
    n_calls: int = 0
    planned: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    _next: int = 0
    _next_node: int = 0
    _by_key: dict[str, CallEntry] = field(default_factory=dict[str, CallEntry])
    _by_body: dict[Digest, list[CallEntry]] = field(default_factory=dict[Digest, list[CallEntry]])
    _flights: list[Flight] = field(default_factory=list[Flight])
    _dropped: Counter[Digest] = field(default_factory=Counter[Digest])
    _loaded: bool = False
    _closing: bool = False
    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    _player: Player | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    # calls
    async def call(self, request: CallRequest, sample: Sample) -> tuple[RecordedCall, CallEntry]:
        """Answer a call: as it was answered before, together with the same call in progress, or by `sample`.

        Raises:
            SessionOver, CallsUsedUp, RateLimited (too many at once), Conflict (an idempotency key used again), and what
        `sample` raises.
        """
        await self.load()
        self._check_open()
        entry = self._earlier(request)
        if entry is None:
            flight = self._joined(request) or self._begin(request, sample)
            recorded = await flight.result()
            entry = self._entry(recorded.number)
        else:
            recorded = await self._read(entry)
            metrics.SESSION_CALLS.labels("repeated").inc()
        return recorded, entry

    def delivered(self, entry: CallEntry) -> None:
        """Record that an answer was sent; a crash may lose it, then a repeated call gets the same answer once more."""
        if not entry.delivered:
            entry.delivered = True
            self.store.later(
                ("UPDATE calls SET delivered = 1 WHERE session = ? AND number = ?", (self.record.id, entry.number))
            )

    def _check_open(self) -> None:
        if self.state != "running" or self._closing:
            why = f": {self.reason}" if self.reason else ""
            raise SessionOver(f"session {self.record.id} is over{why}", "claim or start another one")

    def _earlier(self, request: CallRequest) -> CallEntry | None:
        """Return the recorded call that this one repeats."""
        if request.key is not None:
            entry = self._by_key.get(request.key)
            if entry is not None and entry.body != request.body:
                raise Conflict(
                    f"the idempotency key {request.key[:80]!r} was sent before with another body", "use a new key"
                )
            return entry
        same = self._by_body.get(request.body, [])
        undelivered = [entry for entry in same if not entry.delivered]
        if undelivered:
            return undelivered[-1]
        if not request.is_retry or not same or self._joined(request) is not None or self._dropped[request.body]:
            return None
        return same[-1]

    def _joined(self, request: CallRequest) -> Flight | None:
        """Return the call in progress that this one repeats."""
        if request.key is not None:
            flight = next((one for one in self._flights if one.request.key == request.key), None)
            if flight is not None and flight.request.body != request.body:
                raise Conflict(f"the idempotency key {request.key[:80]!r} is in use with another body", "use a new key")
            return flight
        if not request.is_retry:
            return None
        return next((one for one in reversed(self._flights) if one.request.body == request.body), None)

    def _begin(self, request: CallRequest, sample: Sample) -> Flight:
        if self.n_calls + len(self._flights) >= self.max_calls:
            self.reached("turns")
            raise CallsUsedUp(
                f"session {self.record.id} has made its {self.max_calls} calls", "orchestrator.max_turns limits them"
            )
        if len(self._flights) >= MOST_AT_ONCE:
            raise RateLimited(f"{MOST_AT_ONCE} calls of session {self.record.id} run at once, more may not")
        self._dropped[request.body] -= self._dropped[request.body] > 0
        flight, number = Flight(request, asyncio.get_running_loop().create_future()), self._next
        self._next += 1
        self._flights.append(flight)
        flight.task = self.spawn(flight.run(self._fly(flight, number, sample)))
        return flight

    async def _fly(self, flight: Flight, number: int, sample: Sample) -> RecordedCall:
        recorded = None
        try:
            recorded = await sample(number)
            self._check_open()
            flight.writing = True
            entry = CallEntry(number, flight.request.key, flight.request.body)
            await self.store.write(*self._statements(recorded, entry))
            self._add(recorded.nodes, entry)
        finally:
            self._flights.remove(flight)
            self.planned.pop(number, None)
            if recorded is None:
                self._dropped[flight.request.body] += 1
        return recorded

    def _statements(self, recorded: RecordedCall, entry: CallEntry) -> list[Statement]:
        id_ = self.record.id
        return [
            *(("INSERT INTO nodes VALUES (?, ?, ?)", (id_, node.number, node.encode())) for node in recorded.nodes),
            (
                "INSERT INTO calls VALUES (?, ?, ?, ?, ?, 0)",
                (id_, entry.number, entry.key, entry.body, recorded.encode()),
            ),
        ]

    def _add(self, nodes: Sequence[Node], entry: CallEntry) -> None:
        for node in nodes:
            self.tree.add(node)
            if node.reason is not None:
                metrics.SESSION_SEQUENCES.labels(node.reason).inc()
        self._index(entry)
        self.limit = None if self.limit == "context" else self.limit  # the agent has gone on
        metrics.SESSION_CALLS.labels("answered").inc()

    def _index(self, entry: CallEntry) -> None:
        self.n_calls += 1
        if entry.key is not None:
            self._by_key[entry.key] = entry
        self._by_body.setdefault(entry.body, []).append(entry)

    def _entry(self, number: int) -> CallEntry:
        return next(e for same in self._by_body.values() for e in same if e.number == number)

    async def _read(self, entry: CallEntry) -> RecordedCall:
        def answer(db: sqlite3.Connection) -> bytes:
            sql = "SELECT answer FROM calls WHERE session = ? AND number = ?"
            return db.execute(sql, (self.record.id, entry.number)).fetchone()[0]

        return RecordedCall.decode(await self.store.run(answer), self.tree)

    def number_nodes(self, n: int) -> range:
        """Reserve numbers for n nodes."""
        self._next_node += n
        return range(self._next_node - n, self._next_node)

    def reached(self, limit: Limit) -> None:
        """Remember that a limit has refused a call."""
        if self.limit != limit:
            self.limit_at = time.monotonic()
        self.limit = limit
        self._notify()

    async def load(self) -> None:
        """Read turns and calls from the store, once."""
        if self._loaded:
            return
        async with self._alone:
            if not self._loaded:
                nodes, calls = await self.store.run(self._stored)
                for node in map(Node.decode, nodes):
                    self.tree.add(node)
                    self._next_node = max(self._next_node, node.number + 1)
                for number, key, body, delivered in calls:
                    self._index(CallEntry(number, key, body, bool(delivered)))
                    self._next = max(self._next, number + 1)
                self._loaded = True

    def _stored(self, db: sqlite3.Connection) -> tuple[list[bytes], list[Any]]:
        of_session = (self.record.id,)
        nodes = db.execute("SELECT node FROM nodes WHERE session = ? ORDER BY number", of_session).fetchall()
        sql = "SELECT number, key, body, delivered FROM calls WHERE session = ? ORDER BY number"
        return [row[0] for row in nodes], db.execute(sql, of_session).fetchall()

    # state
    async def end(self, output: str = "") -> None:
        """End the session; calls in progress are given up. Ending it again changes nothing.

        Raises Conflict if it was given up or trained, or has ended with another output.
        """
        async with self._alone:
            if self.state == "ended":
                if output and output != self.output:
                    raise Conflict(f"session {self.record.id} has ended before, with another output")
                return
            if self.state != "running":
                raise Conflict(f"session {self.record.id} is {self.state}, and cannot end", self.reason)
            self.output = output
            await self._leave("ended", "")

    async def give_reward(self, result: SessionResult) -> None:
        """Store the result of an ended session. The same result again changes nothing.

        Raises Conflict in any other state, or if there is another result.
        """
        async with self._alone:
            if self.state == "running":
                raise Conflict(f"session {self.record.id} is running: it gets its reward after its end", "end it first")
            if self.state != "ended":
                raise Conflict(f"session {self.record.id} is {self.state}, and takes no reward", self.reason)
            if self.result is not None:
                if self.result != result:
                    raise Conflict(f"session {self.record.id} has another reward, {self.result.reward:g}")
                return
            await self._store("ended", self.reason, result)

    async def void(self, reason: str) -> None:
        """Give the session up, unless its samples are settled."""
        async with self._alone:
            if self.state in ("running", "ended"):
                await self._leave("void", reason)

    async def trained(self) -> None:
        """Record that the samples of an ended session were trained on."""
        async with self._alone:
            if self.state == "ended":
                await self._store("trained", self.reason, self.result)

    async def _leave(self, state: State, reason: str) -> None:
        """Leave the state `running`: calls whose record is being written are the last."""
        self._closing = True
        try:
            for flight in self._flights:
                flight.give_up()
            if writing := [flight.done for flight in self._flights if flight.writing]:
                await asyncio.wait(writing)
            await self._store(state, reason, self.result)
        finally:
            self._closing = False

    async def _store(self, state: State, reason: str, result: SessionResult | None) -> None:
        encoded = None if result is None else result.encode()
        await self.store.write((_UPDATE, (state, reason, encoded, self.output, self.record.id)))
        self.state, self.reason, self.result = state, reason, result
        self._notify()

    async def change(self) -> None:
        """Wait until the state, the result, the claim or the limit changes."""
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def claim(self, by: str, expires: float) -> None:
        """Give the session to an agent; `by` is the request that claims it."""
        sql = "UPDATE sessions SET claimed = ?, expires = ? WHERE id = ?"
        await self.store.write((sql, (by, expires, self.record.id)))
        self.claimed, self.expires = by, expires
        self._notify()

    # playing
    @contextmanager
    def played(self, player: Player) -> Iterator[None]:
        """Answer calls for a sample, within the context."""
        self._player, self.sampling = player, player.spec.sampling
        self._notify()
        try:
            yield
        finally:
            self._player = None

    @property
    def is_played(self) -> bool:
        return self._player is not None

    async def player(self) -> Player:
        """Wait for the orchestrator to take up the session's ticket. Raises Unavailable, SessionOver."""
        deadline = time.monotonic() + _PLAYER_S
        while self._player is None:
            self._check_open()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self.change()
            except TimeoutError:
                raise Unavailable(
                    f"nobody plays ticket {self.record.ticket} at present", "send the call again", 5.0
                ) from None
        return self._player
