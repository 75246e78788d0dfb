"""Session of one agent episode: its state, its recorded calls, and its calls in progress.

Invariants
- States go `running → ended → trained | void`, or `running → void`. Each change is on disk before it is visible.
- A call is recorded together with its turns in one transaction, before the first byte of its answer is sent. A repeated
  call gets the recorded answer; no call is recorded twice.
- If all clients of a call have disconnected, the call is cancelled, unless its record is being written.
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

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.turn import SamplingSpec
from services.orchestrator.store import RecordStore, Statement
from shared.errors import Conflict, RateLimited, Unavailable
from shared.process import tracing
from shared.process.tracing import SpanContext
from volley_agents.sessions import metrics
from volley_agents.sessions.answers import RecordedCall
from volley_agents.sessions.draws import Draws
from volley_agents.sessions.failures import CallsUsedUp, SessionOver
from volley_agents.sessions.messages import Digest
from volley_agents.sessions.records import CallEntry, CallRequest, SessionRecord, SessionResult, State
from volley_agents.sessions.tree import Node, Tree

MOST_AT_ONCE = 64
"""Limit of the calls of one session that run at the same time."""
_RESUME_S = 300.0
"""Time that a call waits for a restarted orchestrator to resume its session's ticket, in seconds."""
_UPDATE = "UPDATE sessions SET state = ?, reason = ?, result = ?, output = ? WHERE id = ?"

type Sample = Callable[[int], Awaitable[RecordedCall]]
"""Samples the answers of call number n, and records nothing."""
type Limit = Literal["turns", "context"]
"""Limit that refused a call: `orchestrator.max_turns`, or the context length."""


@dataclass(frozen=True, slots=True)
class RunningSample:
    """Sample of a group or evaluation that the session generates, the budget of its attempts, and its span."""

    spec: SamplingSpec
    budget: TokenBudget
    place: SpanContext | None = field(default_factory=tracing.here)


@dataclass(slots=True, eq=False)
class CallInProgress:
    """A call in progress. While `is_recording`, its record is being written and it cannot be cancelled."""

    request: CallRequest
    done: asyncio.Future[RecordedCall]
    task: asyncio.Task[None] | None = None
    waiters: int = 0
    is_recording: bool = False

    async def run(self, work: Coroutine[Any, Any, RecordedCall]) -> None:
        """Await the work, and pass its result or its exception to the waiters."""
        try:
            self.done.set_result(await work)
        except asyncio.CancelledError:
            self.done.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - each waiter raises it
            self.done.set_exception(error)
            self.done.exception()  # without a waiter, asyncio would log it as never retrieved

    async def result(self) -> RecordedCall:
        """Wait for the answer. If the last waiter is cancelled, so is the call. Raises the call's exception."""
        self.waiters += 1
        try:
            await asyncio.wait([self.done])
            if self.done.cancelled():
                raise Unavailable("the call was cancelled: its session or the orchestrator ends", "send the call again")
            return self.done.result()
        finally:
            self.waiters -= 1
            if not self.waiters:
                self.cancel()

    def cancel(self) -> None:
        if self.task is not None and not self.is_recording:
            self.task.cancel()


@dataclass
class AgentSession:
    """Session that is open, or was open when this process started.

    `claimed` is the id of the request by which an external agent claimed the session; `output` is the output that this
    agent sent when it ended the session. `expires` is in seconds since 1970. `generate_s` is the time spent sampling.
    `limit` is the limit that refused a call, and `limit_at` the time of the refusal; the next recorded call clears
    `context`.
    `planned` has, for each call in progress, the largest numbers of turns and tokens that it may add.
    """

    record: SessionRecord
    store: RecordStore
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
    _in_progress: list[CallInProgress] = field(default_factory=list[CallInProgress])
    _n_unrecorded: Counter[Digest] = field(default_factory=Counter[Digest])
    _loaded: bool = False
    _closing: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sample: RunningSample | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    # calls
    async def call(self, request: CallRequest, sample: Sample) -> tuple[RecordedCall, CallEntry]:
        """Answer a call: from its record, with the same call in progress, or by `sample`.

        Raises:
            SessionOver, CallsUsedUp, RateLimited (too many at once), Conflict (an idempotency key was used with another
        body), and the exceptions of `sample`.
        """
        await self.load()
        self.check_open()
        entry = self._find_recorded(request)
        if entry is None:
            call = self._find_in_progress(request) or self._begin(request, sample)
            recorded = await call.result()
            entry = self._entry(recorded.number)
        else:
            recorded = await self._read(entry)
            metrics.SESSION_CALLS.labels("repeated").inc()
        return recorded, entry

    def delivered(self, entry: CallEntry) -> None:
        """Record that an answer was sent. If a crash loses the record, a repeated call gets this answer again."""
        if not entry.delivered:
            entry.delivered = True
            self.store.later(
                ("UPDATE calls SET delivered = 1 WHERE session = ? AND number = ?", (self.record.id, entry.number))
            )

    def check_open(self) -> None:
        """Raise SessionOver unless the session is running."""
        if self.state != "running" or self._closing:
            why = f": {self.reason}" if self.reason else ""
            raise SessionOver(f"session {self.record.id} is over{why}", "claim or start another one")

    def _find_recorded(self, request: CallRequest) -> CallEntry | None:
        """Return the recorded call that this request repeats. Raises Conflict."""
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
        if not request.is_retry or not same or self._n_unrecorded[request.body]:
            return None
        return None if self._find_in_progress(request) is not None else same[-1]

    def _find_in_progress(self, request: CallRequest) -> CallInProgress | None:
        """Return the call in progress that this request repeats. Raises Conflict."""
        if request.key is not None:
            call = next((one for one in self._in_progress if one.request.key == request.key), None)
            if call is not None and call.request.body != request.body:
                raise Conflict(f"the idempotency key {request.key[:80]!r} is in use with another body", "use a new key")
            return call
        if not request.is_retry:
            return None
        return next((one for one in reversed(self._in_progress) if one.request.body == request.body), None)

    def _begin(self, request: CallRequest, sample: Sample) -> CallInProgress:
        if self.n_calls + len(self._in_progress) >= self.max_calls:
            self.reached("turns")
            raise CallsUsedUp(
                f"session {self.record.id} has made its {self.max_calls} calls", "orchestrator.max_turns limits them"
            )
        if len(self._in_progress) >= MOST_AT_ONCE:
            raise RateLimited(f"session {self.record.id} has {MOST_AT_ONCE} calls in progress", "wait for one to end")
        self._n_unrecorded[request.body] -= self._n_unrecorded[request.body] > 0
        call, number = CallInProgress(request, asyncio.get_running_loop().create_future()), self._next
        self._next += 1
        self._in_progress.append(call)
        call.task = self.spawn(call.run(self._sample_and_record(call, number, sample)))
        return call

    async def _sample_and_record(self, call: CallInProgress, number: int, sample: Sample) -> RecordedCall:
        recorded = None
        try:
            recorded = await sample(number)
            self.check_open()
            call.is_recording = True
            entry = CallEntry(number, call.request.key, call.request.body)
            await self.store.write(*self._statements(recorded, entry))
            self._add(recorded.nodes, entry)
        finally:
            self._in_progress.remove(call)
            self.planned.pop(number, None)
            if recorded is None:
                self._n_unrecorded[call.request.body] += 1
        return recorded

    def _statements(self, recorded: RecordedCall, entry: CallEntry) -> list[Statement]:
        id_ = self.record.id
        nodes = [("INSERT INTO nodes VALUES (?, ?, ?)", (id_, node.number, node.encode())) for node in recorded.nodes]
        call = (id_, entry.number, entry.key, entry.body, recorded.encode())
        return [*nodes, ("INSERT INTO calls VALUES (?, ?, ?, ?, ?, 0)", call)]

    def _add(self, nodes: Sequence[Node], entry: CallEntry) -> None:
        for node in nodes:
            self.tree.add(node)
            if node.reason is not None:
                metrics.SESSION_SEQUENCES.labels(node.reason).inc()
        self._index(entry)
        self.limit = None if self.limit == "context" else self.limit  # the agent has continued
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
        """Record that a limit refused a call."""
        if self.limit != limit:
            self.limit_at = time.monotonic()
        self.limit = limit
        self._notify()

    async def load(self) -> None:
        """Read turns and calls from the store, once."""
        if self._loaded:
            return
        async with self._lock:
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
        """End the session and cancel its calls in progress. A second end with the same output changes nothing.

        Raises Conflict if the session is void or trained, or ended with another output.
        """
        async with self._lock:
            if self.state == "ended":
                if output and output != self.output:
                    raise Conflict(f"session {self.record.id} has already ended with another output")
                return
            if self.state != "running":
                raise Conflict(f"session {self.record.id} is {self.state} and cannot be ended", self.reason)
            self.output = output
            await self._change_state("ended", "")

    async def give_reward(self, result: SessionResult) -> None:
        """Store the result of an ended session. The same result again changes nothing.

        Raises Conflict in any other state, or if the session has a different result.
        """
        async with self._lock:
            if self.state == "running":
                raise Conflict(f"session {self.record.id} is still running, so it accepts no reward", "end it first")
            if self.state != "ended":
                raise Conflict(f"session {self.record.id} is {self.state} and accepts no reward", self.reason)
            if self.result is None:
                await self._store("ended", self.reason, result)
            elif self.result != result:
                reward = f"{self.result.reward:g}"
                raise Conflict(f"session {self.record.id} already has another result, with reward {reward}")

    async def void(self, reason: str) -> None:
        """Make the session void, unless it is void or trained already."""
        async with self._lock:
            if self.state in ("running", "ended"):
                await self._change_state("void", reason)

    async def trained(self) -> None:
        """Record that an ended session was trained on."""
        async with self._lock:
            if self.state == "ended":
                await self._store("trained", self.reason, self.result)

    async def _change_state(self, state: State, reason: str) -> None:
        """Refuse new calls, finish or cancel those in progress, and store the new state."""
        self._closing = True
        try:
            for call in self._in_progress:
                call.cancel()
            if recording := [call.done for call in self._in_progress if call.is_recording]:
                await asyncio.wait(recording)
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
        """Give the session to an external agent; `by` is the id of its request."""
        sql = "UPDATE sessions SET claimed = ?, expires = ? WHERE id = ?"
        await self.store.write((sql, (by, expires, self.record.id)))
        self.claimed, self.expires = by, expires
        self._notify()

    # the sample
    @contextmanager
    def running(self, sample: RunningSample) -> Iterator[None]:
        """Allow calls to be sampled within the context. Until then, calls wait."""
        self._sample, self.sampling = sample, sample.spec.sampling
        self._notify()
        try:
            yield
        finally:
            self._sample = None

    @property
    def has_running_sample(self) -> bool:
        return self._sample is not None

    async def running_sample(self) -> RunningSample:
        """Wait until the orchestrator runs the session's ticket. Raises Unavailable, SessionOver."""
        try:
            async with asyncio.timeout(_RESUME_S):
                while self._sample is None:
                    self.check_open()
                    await self.change()
        except TimeoutError:
            problem = f"the orchestrator does not run ticket {self.record.ticket} at present"
            raise Unavailable(problem, "send the call again", 5.0) from None
        return self._sample
