"""All sessions of a run: start, find, claim and settle them.

The file is made with the first session; a run without agents has none. Sessions that are running or ended are kept in
memory as far as they are in use; settled ones leave their record and their count.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.orchestrator.episodes.turn import SamplingSpec
from services.orchestrator.store import RecordStore
from shared.clients.env import Opening
from shared.errors import NotFound, Unauthorized, Unavailable
from shared.process import telemetry
from volley_agents.sessions import metrics
from volley_agents.sessions.failures import SessionOver
from volley_agents.sessions.records import OPEN, SessionRecord, SessionResult, State, new_record, place_of
from volley_agents.sessions.session import AgentSession
from volley_agents.sessions.tables import TABLES

_PREFIX = "vs"
_KEPT = 1024  # settled sessions
_READ_S = 10.0
_ONE = "SELECT record, state, reason, result, claimed, output, expires FROM sessions WHERE id = ?"
_ALL = "SELECT record, state, reason, result, claimed, output, expires FROM sessions WHERE settled = 0"
_log = telemetry.Log("sessions")


class Sessions:
    """Sessions of one run.

    Args:
        path: of the store.
        ttl_s: how long a session may be running.
        max_calls: number of calls that a session may make.

    `run_id` is the run's identifier.
    """

    def __init__(self, path: Path, ttl_s: float, max_calls: int) -> None:
        self._path, self.ttl_s, self._max_calls = path, ttl_s, max_calls
        self._store: RecordStore | None = None
        self._secret = b""
        self._sessions: dict[str, AgentSession] = {}
        self._settled: Counter[State] = Counter()
        self._tasks: asyncio.TaskGroup | None = None
        self._alone, self._opened, self._offered = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self._offers: list[AgentSession] = []
        self._claiming = asyncio.Lock()
        self.run_id = ""

    async def work(self) -> None:
        """Worker: read what an earlier process has stored, and run the calls of all sessions, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                if self._path.exists():
                    await self._open()
                self._opened.set()
                await asyncio.Event().wait()
        finally:
            if self._store is not None:
                await asyncio.shield(asyncio.to_thread(self._store.close))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None
        return self._tasks.create_task(work)

    async def _open(self) -> RecordStore:
        """Open the store, once. Raises Unavailable, StorageUnavailable, ConfigError."""
        async with self._alone:
            if self._store is None:
                store = await asyncio.to_thread(RecordStore, self._path, TABLES)
                self._secret, rows, counts = await store.run(_stored)
                for row in rows:
                    session = self._session(store, *row)
                    self._sessions[session.record.id] = session
                self._settled.update(dict(counts))
                self._store = store
            return self._store

    def _session(self, store: RecordStore, record: bytes, *row: Any) -> AgentSession:
        state, reason, result, *rest = row
        decoded = None if result is None else SessionResult.decode(result)
        return AgentSession(
            SessionRecord.decode(record), store, self._max_calls, self._spawn, state, reason, decoded, *rest
        )

    async def begin(self, spec: SamplingSpec, opening: Opening, request_id: str) -> AgentSession:
        """Start the session of a sample."""
        store = await self._open()
        record = new_record(secrets.token_hex(8), spec, opening, request_id, time.time(), self.run_id)
        row = (record.id, record.encode(), "running", "", None, "", "", expires := time.time() + self.ttl_s, 0)
        await store.write(("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row))
        session = AgentSession(record, store, self._max_calls, self._spawn, expires=expires)
        self._sessions[record.id] = session
        metrics.SESSIONS.labels("begun").inc()
        return session

    async def at(self, spec: SamplingSpec) -> AgentSession | None:
        """Return the open session of a sample."""
        await self._opened.wait()
        place = place_of(spec)
        return next((one for one in self._open_ones() if one.record.place == place and self._is_own(one)), None)

    def _is_own(self, session: AgentSession) -> bool:
        return session.record.beginning in ("", self.run_id)

    async def follow(self, run_id: str) -> None:
        """Set the run's id; give up sessions of another id, whose tickets have the same numbers."""
        await self._opened.wait()
        self.run_id = run_id
        for session in [one for one in self._open_ones() if not self._is_own(one) and not one.has_running_sample]:
            await session.void("the run was restarted")

    def _open_ones(self) -> Iterator[AgentSession]:
        return (one for one in self._sessions.values() if one.state in OPEN)

    def key_of(self, session: AgentSession) -> str:
        """Key of a session: its id, and a code that only this run's secret makes."""
        return f"{_PREFIX}_{session.record.id}_{self._code(session.record.id)}"

    def _code(self, id_: str) -> str:
        return hmac.new(self._secret, id_.encode(), hashlib.sha256).hexdigest()[:40]

    async def _ready(self) -> None:
        """Wait until an earlier process's sessions are read. Raises Unavailable."""
        try:
            async with asyncio.timeout(_READ_S):
                await self._opened.wait()
        except TimeoutError:
            raise Unavailable("the sessions are not read yet", "try again") from None

    async def by_key(self, key: str) -> AgentSession:
        """Find the running session of a key. Raises Unauthorized, SessionOver."""
        await self._ready()
        prefix, _, rest = key.partition("_")
        id_, _, code = rest.partition("_")
        is_right = hmac.compare_digest(code.encode(), self._code(id_).encode())
        if prefix == _PREFIX and is_right and self._secret:
            try:
                session = await self.find(id_)
            except NotFound:
                raise SessionOver(f"session {id_} is over", "claim or start another one") from None
            session.check_open()
            return session
        raise Unauthorized("missing or wrong key of a session", "send it as Authorization: Bearer vs_… or as x-api-key")

    async def find(self, id_: str) -> AgentSession:
        """Find a session, also a settled one that is kept. Raises NotFound."""
        await self._ready()
        if (session := self._sessions.get(id_)) is not None:
            return session
        if self._store is not None:
            row = await self._store.run(lambda db: db.execute(_ONE, (id_,)).fetchone())
            if row is not None:
                return self._session(self._store, *row)
        raise NotFound(f"there is no session {id_[:40]!r}", f"only the last {_KEPT} finished sessions are kept")

    # external agents
    async def offer(self, session: AgentSession) -> None:
        """Offer a session to external agents, until one claims it."""
        if session.claimed:
            return
        self._offers.append(session)
        self._offered.set()
        self._offered = asyncio.Event()
        try:
            while not session.claimed and session.state == "running":
                await session.change()
        finally:
            if session in self._offers:
                self._offers.remove(session)

    async def claim(self, env: str | None, by: str, wait_s: float) -> AgentSession | None:
        """Claim the oldest offered session; None if there is none within `wait_s`. Repeating it with `by` is safe.

        Args:
            env: only of this environment, with its version or without; None for any.
        """
        await self._ready()
        deadline = time.monotonic() + wait_s
        while True:
            async with self._claiming:  # a repeated claim may wait together with the first one
                session = next((one for one in self._open_ones() if one.claimed == by), None) or self._unclaimed(env)
                if session is not None and not session.claimed:
                    await session.claim(by, time.time() + self.ttl_s)
            if session is not None:
                return session
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._offered.wait()

    def _unclaimed(self, env: str | None) -> AgentSession | None:
        waiting = (one for one in self._offers if not one.claimed and one.state == "running")
        return next((one for one in waiting if env in (None, one.record.env, one.record.env.partition("@")[0])), None)

    # the end
    def tickets(self) -> set[int]:
        """Return tickets of open sessions; 0 for evaluations."""
        return {one.record.ticket for one in self._open_ones()}

    async def open_tickets(self) -> set[int]:
        """Return tickets of sessions still open from an earlier process."""
        await self._opened.wait()
        return self.tickets()

    async def settle(self, ticket: int, disposition: str) -> list[AgentSession]:
        """Settle the sessions of a ticket that has ended; return those that were still running."""
        return await self._settle([one for one in self._open_ones() if one.record.ticket == ticket], disposition)

    async def settle_evaluation(self, step: int) -> list[AgentSession]:
        """Settle the sessions of evaluations up to that of `step`."""
        measured = [one for one in self._open_ones() if not one.record.ticket and _step(one.record.place) <= step]
        return await self._settle(measured, "evaluation")

    async def _settle(self, sessions: list[AgentSession], disposition: str) -> list[AgentSession]:
        running = [one for one in sessions if one.state == "running"]
        for session in sessions:
            if disposition == "trained" and session.state == "ended":
                await session.trained()
            else:
                await session.void(f"ticket ended as {disposition}" if session.record.ticket else disposition)
        return running

    async def prune(self) -> None:
        """Drop turns and calls of sessions that are settled."""
        over = [one for one in self._sessions.values() if one.state not in OPEN and not one.has_running_sample]
        if not over or self._store is None:
            return
        ids = [(one.record.id,) for one in over]
        counts = Counter(one.state for one in over)
        await self._store.run(lambda db: _pruned(db, ids, counts))
        for one in over:
            del self._sessions[one.record.id]
        self._settled.update(counts)

    def describe(self) -> dict[str, int]:
        """Number of sessions by state, and how many wait for an agent to claim them."""
        found = self._settled + Counter[State](one.state for one in self._sessions.values())
        return {**found, **({"unclaimed": n} if (n := len(self._offers)) else {})}


def _stored(db: sqlite3.Connection) -> tuple[bytes, list[Any], list[Any]]:
    """Read the secret, which is made once; the sessions that are not settled; and the counts of the settled ones."""
    db.execute("INSERT OR IGNORE INTO secrets VALUES ('keys', ?)", (secrets.token_bytes(32),))
    secret = db.execute("SELECT value FROM secrets WHERE name = 'keys'").fetchone()[0]
    rows = db.execute(_ALL).fetchall()
    return secret, rows, db.execute("SELECT state, n FROM counts").fetchall()


def _pruned(db: sqlite3.Connection, ids: list[tuple[str]], counts: Counter[State]) -> None:
    db.executemany("DELETE FROM nodes WHERE session = ?", ids)
    db.executemany("DELETE FROM calls WHERE session = ?", ids)
    db.executemany("UPDATE sessions SET settled = (SELECT max(settled) + 1 FROM sessions) WHERE id = ?", ids)
    db.execute(
        "DELETE FROM sessions WHERE settled > 0 AND settled <= (SELECT max(settled) FROM sessions) - ?", (_KEPT,)
    )
    sql = "INSERT INTO counts VALUES (?, ?) ON CONFLICT (state) DO UPDATE SET n = n + excluded.n"
    db.executemany(sql, list(counts.items()))


def _step(place: str) -> int:
    return int(place.rpartition("@")[2])
