"""Durable record of sessions, models, requests and checkpoints (see `shared.run.futures`).

Every method blocks; calls must not overlap. A method that changes something is one transaction, durable when it
returns.

Invariants: a request is durable before it is acknowledged; the same request (owner and number) is recorded once, and a
different one with its number is refused; a future is settled once, in the transaction that writes its ledger row; the
bodies of requests that a model's saved state does not cover are kept.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ConfigError, InputError, NotFound
from shared.files import locks
from volley_tinker import futures
from volley_tinker.futures import LedgerRow
from volley_tinker.server.entries import UNNAMED, Checkpoint, Future, Request, RequestResult

_FUTURES = "SELECT id, owner, seq, kind, body, media, outcome, result FROM futures"
_CHECKPOINTS = "SELECT * FROM checkpoints"


class FutureStore:
    """Store of one process.

    Args:
        folder: of the database and of the files that it names.

    Raises ConfigError if another process uses the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = locks.lock_file(folder / futures.LOCK)
        if not locks.try_lock(self._lock):
            os.close(self._lock)
            raise ConfigError(f"{folder} is used by another server", "end it first, or name another --folder")
        self._db = futures.connect(folder / futures.DATABASE)
        futures.JOURNAL.open(self._db)
        self.remove_unrecorded()

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    def remove_unrecorded(self, before: float = math.inf) -> None:
        """Remove files written before a time that the record does not name.

        They are of an earlier process that ended before it recorded them, or of checkpoints that were overwritten.
        """
        rows = self._rows("SELECT file FROM checkpoints UNION SELECT state_file FROM models WHERE state_file NOT NULL")
        recorded = {file for (file,) in rows}
        for path in [one for name in ("states", "checkpoints") for one in (self.folder / name).glob("*")]:
            with suppress(FileNotFoundError):  # a draft may get its name meanwhile
                if str(path.relative_to(self.folder)) not in recorded and path.stat().st_mtime < before:
                    path.unlink()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            futures.JOURNAL.append(self._db)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._db.execute(query, values).fetchall()

    def add_session(self, session: str, described: Mapping[str, Any]) -> None:
        now = time.time()
        with self._transaction() as db:
            db.execute("INSERT INTO sessions VALUES (?, ?, ?, NULL, ?)", (session, now, now, orjson.dumps(described)))

    def session(self, session: str) -> tuple[Mapping[str, Any], str | None]:
        """Return a session's description, and why it was finished, if it was. Raises NotFound."""
        for described, finished in self._rows("SELECT described, finished FROM sessions WHERE id = ?", session):
            return orjson.loads(described), finished
        raise NotFound(
            f"there is no session {session[:80]}", "create one; sessions of another server are not known here"
        )

    def touch_session(self, session: str) -> None:
        with self._transaction() as db:
            db.execute("UPDATE sessions SET seen = ? WHERE id = ?", (time.time(), session))

    def finish_session(self, session: str, reason: str) -> None:
        """Finish a session; the first reason stays."""
        with self._transaction() as db:
            db.execute("UPDATE sessions SET finished = ? WHERE id = ? AND finished IS NULL", (reason, session))

    def sessions(self, limit: int, offset: int) -> list[str]:
        return [
            i for (i,) in self._rows("SELECT id FROM sessions ORDER BY created DESC LIMIT ? OFFSET ?", limit, offset)
        ]

    def add_model(self, model: str, session: str, spec: Mapping[str, Any], request: Request) -> Future:
        """Record a model with its first request, of number 0. Repeated, it returns the recorded one."""
        now = time.time()
        with self._transaction() as db:
            if (known := self._known(request)) is not None:
                return known
            values = (model, session, now, now, orjson.dumps(spec))
            db.execute("INSERT INTO models (id, session, created, seen, spec) VALUES (?, ?, ?, ?, ?)", values)
            return self._record(db, request)

    def model(self, model: str) -> Mapping[str, Any]:
        """Return a model's specification, with `session`, `created` and `seen`. Raises NotFound."""
        for session, created, seen, spec in self._rows(
            "SELECT session, created, seen, spec FROM models WHERE id = ?", model
        ):
            return {**orjson.loads(spec), "session": session, "created": created, "seen": seen}
        raise NotFound(
            f"there is no model {model[:80]}", "create it first; models of another server are not known here"
        )

    def models(self, session: str | None = None) -> list[str]:
        """Return the models of a session or of all, the newest first."""
        found = self._rows("SELECT id, session FROM models ORDER BY created DESC")
        return [model for model, of in found if session in (None, of)]

    def state_of(self, model: str) -> tuple[int, str, str] | None:
        """Return number, file and checksum of a model's saved state; None without one."""
        for seq, file, weights in self._rows(
            "SELECT state_seq, state_file, state_weights FROM models WHERE id = ? AND state_seq IS NOT NULL", model
        ):
            return seq, file, weights
        return None

    def set_state(self, model: str, seq: int, file: str, digest: str, weights: str) -> None:
        """Record a model's saved state after request `seq`, and forget the bodies that it covers."""
        with self._transaction() as db:
            values = (seq, file, digest, weights, model)
            db.execute(
                "UPDATE models SET state_seq = ?, state_file = ?, state_digest = ?, state_weights = ? WHERE id = ?",
                values,
            )
            db.execute(
                "UPDATE futures SET body = NULL WHERE owner = ? AND seq <= ? AND outcome IS NOT NULL", (model, seq)
            )

    def record(self, request: Request) -> Future:
        """Record a request; repeated, return the recorded one.

        Raises InputError for another one of its number, and if the model's session has finished.
        """
        with self._transaction() as db:
            if (known := self._known(request)) is not None:
                return known
            for (finished,) in self._rows(
                "SELECT finished FROM sessions WHERE id = (SELECT session FROM models WHERE id = ?)", request.owner
            ):
                if finished is not None:
                    raise InputError(
                        f"the session of {request.owner[:80]} has finished: {finished}",
                        "load a checkpoint into a model of another session",
                    )
            return self._record(db, request)

    def _known(self, request: Request) -> Future | None:
        for kind, digest in self._rows("SELECT kind, request FROM futures WHERE id = ?", request.id):
            if (kind, digest) != (request.kind, request.digest):
                raise InputError(
                    f"seq_id {request.seq} of {request.owner[:80]} was used for another request, a {kind}",
                    "number the requests of a model 1, 2, … in the order of their execution; a repeated request must be"
                    " the same",
                )
            return self.future(request.id)
        return None

    def _record(self, db: sqlite3.Connection, request: Request) -> Future:
        values = (request.id, request.owner, request.seq, request.kind, request.digest, request.body, request.media)
        db.execute(
            "INSERT INTO futures (id, owner, seq, kind, request, body, media, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*values, time.time()),
        )
        return self.future(request.id)

    def future(self, future: str) -> Future:
        """Raises NotFound."""
        for row in self._rows(_FUTURES + " WHERE id = ?", future):
            return Future(*row)
        raise NotFound(f"there is no future {future[:80]}", "send the request again")

    def pending_samples(self) -> list[Future]:
        """Return sampling requests that are not settled, in the order of their arrival."""
        unsettled = " WHERE outcome IS NULL AND owner NOT IN (SELECT id FROM models) ORDER BY created"
        return [Future(*row) for row in self._rows(_FUTURES + unsettled)]

    def first_pending(self) -> dict[str, int]:
        """Return the number of the first unsettled request of each model that has one."""
        return dict(
            self._rows(
                "SELECT owner, min(seq) FROM futures WHERE outcome IS NULL AND owner IN (SELECT id FROM models)"
                " GROUP BY owner"
            )
        )

    def n_pending(self, owner: str) -> int:
        return self._rows("SELECT count(*) FROM futures WHERE owner = ? AND outcome IS NULL", owner)[0][0]

    def next_seq(self, model: str) -> int:
        """Return the number of a model's first request that is not settled."""
        return self._rows("SELECT coalesce(max(seq), -1) + 1 FROM ledger WHERE owner = ?", model)[0][0]

    def settled_after(self, model: str, seq: int) -> list[tuple[Future, str]]:
        """Return a model's settled requests after number `seq`, each with the checksum of weights after it."""
        found = self._rows("SELECT future, weights FROM ledger WHERE owner = ? AND seq > ? ORDER BY seq", model, seq)
        return [(self.future(future), weights) for future, weights in found]

    def settle(self, future: Future, made: RequestResult) -> None:
        """Settle a future, once: a second settlement changes nothing."""
        with self._transaction() as db:
            recorded = self._rows("SELECT request, outcome FROM futures WHERE id = ?", future.id)
            if recorded[0][1] is not None:
                return
            keeps_body = future.kind in futures.REPLAYED and made.outcome == "done"
            db.execute(
                "UPDATE futures SET outcome = ?, result = ?, settled = ?, body = CASE WHEN ? THEN body END"
                " WHERE id = ?",
                (made.outcome, made.result, time.time(), keeps_body, future.id),
            )
            self._append(db, future, recorded[0][0], made)
            db.execute("UPDATE models SET seen = ? WHERE id = ?", (time.time(), future.owner))
            if made.checkpoint is not None:
                self._put_checkpoint(db, made.checkpoint)
            if made.sampler is not None:
                self._put_sampler(db, *made.sampler)

    def _append(self, db: sqlite3.Connection, future: Future, request: str, made: RequestResult) -> None:
        last = self._rows("SELECT n, digest FROM ledger ORDER BY n DESC LIMIT 1") or [(0, futures.FIRST)]
        n, before = last[0]
        result = hashlib.sha256(made.result).hexdigest()
        row = LedgerRow(future.id, future.owner, future.seq, future.kind, request, made.outcome, result, made.weights)
        values = (n + 1, *row, before, row.digest(before))
        db.execute("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def expire_results(self, before: float) -> None:
        """Forget the results of futures that were settled before a time; their ledger rows stay."""
        with self._transaction() as db:
            db.execute("UPDATE futures SET result = NULL WHERE settled < ? AND result IS NOT NULL", (before,))

    def add_sampler(self, sampler: str, session: str, path: str | None) -> None:
        """Record a sampling session of the weights at `path`, None for the base; repeated, it changes nothing.

        Raises InputError if its number was used for other weights.
        """
        with self._transaction() as db:
            self._put_sampler(db, sampler, session, path)
            if (known := self.sampler(sampler)) != path and not _is_replaced(known, path):
                raise InputError(
                    f"the sampling session {sampler[:80]} was opened for {known or 'the base model'}",
                    "choose another sampling_session_seq_id",
                )

    def _put_sampler(self, db: sqlite3.Connection, sampler: str, session: str, path: str | None) -> None:
        values = (sampler, session, time.time(), path)
        db.execute("INSERT OR IGNORE INTO samplers (id, session, created, path) VALUES (?, ?, ?, ?)", values)

    def sampler(self, sampler: str) -> str | None:
        """Return the path of the weights of a sampling session, None for the base. Raises NotFound."""
        for (path,) in self._rows("SELECT path FROM samplers WHERE id = ?", sampler):
            return path
        raise NotFound(f"there is no sampling session {sampler[:80]}", "create it first")

    def samplers(self, session: str) -> list[str]:
        return [i for (i,) in self._rows("SELECT id FROM samplers WHERE session = ? ORDER BY created", session)]

    def join_sampler(self, sampler: str) -> int:
        """Return a number for another client of a sampling session. Raises NotFound."""
        self.sampler(sampler)
        with self._transaction() as db:
            db.execute("UPDATE samplers SET clients = clients + 1 WHERE id = ?", (sampler,))
            return self._rows("SELECT clients FROM samplers WHERE id = ?", sampler)[0][0]

    def _put_checkpoint(self, db: sqlite3.Connection, one: Checkpoint) -> None:
        """Put a checkpoint; one that it replaces stays, without a name of the client, for its sampling sessions."""
        if self._rows("SELECT 1 FROM samplers WHERE path = ? LIMIT 1", one.path):
            (old,) = self._rows("SELECT digest FROM checkpoints WHERE path = ?", one.path) or [("",)]
            path = f"{_replaced(one.path)}{old[0][:16]}"
            name = path.rpartition("/")[2]
            db.execute("UPDATE OR REPLACE checkpoints SET path = ?, name = ? WHERE path = ?", (path, name, one.path))
            db.execute("UPDATE samplers SET path = ? WHERE path = ?", (path, one.path))
        values = (one.path, one.model, one.kind, one.name, one.file, one.digest, one.size, one.created, one.expires)
        metadata = None if one.metadata is None else orjson.dumps(one.metadata)
        db.execute(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*values, int(one.public), orjson.dumps(one.spec), metadata),
        )

    def checkpoint(self, path: str) -> Checkpoint:
        """Raises NotFound."""
        for row in self._rows(_CHECKPOINTS + " WHERE path = ?", path):
            return _checkpoint(row)
        raise NotFound(f"there is no checkpoint {path[:200]}", "it was never saved here, or it has expired")

    def checkpoints(self, model: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a model or of all, the newest first."""
        found = self._rows(_CHECKPOINTS + " WHERE ? IS NULL OR model = ? ORDER BY created DESC", model, model)
        return [_checkpoint(row) for row in found]

    def publish_checkpoint(self, path: str, *, public: bool) -> None:
        """Publish or hide a checkpoint. Raises NotFound."""
        self.checkpoint(path)
        with self._transaction() as db:
            db.execute("UPDATE checkpoints SET public = ? WHERE path = ?", (int(public), path))

    def expire_checkpoint(self, path: str, expires: float | None) -> None:
        """Set when a checkpoint expires; None: never. Raises NotFound."""
        self.checkpoint(path)
        with self._transaction() as db:
            db.execute("UPDATE checkpoints SET expires = ? WHERE path = ?", (expires, path))

    def delete_checkpoint(self, path: str) -> None:
        """Forget a checkpoint, then remove its file. Raises NotFound."""
        found = self.checkpoint(path)
        with self._transaction() as db:
            db.execute("DELETE FROM checkpoints WHERE path = ?", (path,))
        (self.folder / found.file).unlink(missing_ok=True)
        if found.kind == "external":
            shutil.rmtree((self.folder / found.file).parent, ignore_errors=True)


def _replaced(path: str) -> str:
    """Return the beginning of the addresses of checkpoints that were replaced at `path`."""
    head, _, name = path.rpartition("/")
    return f"{head}/{UNNAMED}{name}-"


def _is_replaced(known: str | None, path: str | None) -> bool:
    return known is not None and path is not None and f"{known.rpartition('-')[0]}-" == _replaced(path)


def _checkpoint(row: tuple[Any, ...]) -> Checkpoint:
    *plain, public, spec, metadata = row
    kept = None if metadata is None else orjson.loads(metadata)
    return Checkpoint(*plain, public=bool(public), spec=orjson.loads(spec), metadata=kept)
