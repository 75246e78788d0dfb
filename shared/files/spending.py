"""Cost of a run's requests to external servers, by server, in an SQLite file of the run's folder.

Invariant: a request is counted on disk before it is sent, so no crash refunds a budget.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from shared.errors import ConfigError, StorageUnavailable
from shared.files import storage

_TABLE = """
CREATE TABLE IF NOT EXISTS spent (server TEXT PRIMARY KEY, requests INTEGER, tokens INTEGER) WITHOUT ROWID;
"""
_WAIT_S = 10.0


class SpendingStore:
    """Counts of requests and tokens. Every method blocks, and may be called in any thread.

    Raises StorageUnavailable, and ConfigError if the file is not an SQLite database.

    Args:
        tables: further tables of the file, as SQL statements.
    """

    def __init__(self, path: Path, tables: str = "") -> None:
        self._path, self._lock = path, threading.Lock()
        with storage.storage(path.parent.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, timeout=_WAIT_S, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_TABLE + tables)
        except sqlite3.OperationalError as error:
            raise StorageUnavailable(f"{path}: {error}", "is the disk full, or the folder read-only?") from error
        except sqlite3.DatabaseError as error:
            hint = "restore the file, or remove it: its record of past requests and costs is then lost"
            raise ConfigError(f"{path} cannot be read: {error}", hint) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._db.close()

    def count_request(self, server: str, max_requests: int | None, max_tokens: int | None) -> str | None:
        """Count a request before it is sent. If it would exceed a budget, count nothing and return the budget."""
        with self._transaction() as db:
            db.execute("BEGIN IMMEDIATE")  # processes count one after the other
            requests, tokens = self._spent(db, server)
            if max_requests is not None and requests >= max_requests:
                return f"max_requests={max_requests}"
            if max_tokens is not None and tokens >= max_tokens:
                return f"max_tokens={max_tokens}"
            self._add(db, server, 1, 0)
        return None

    def count_tokens(self, server: str, tokens: int) -> None:
        """Count the tokens of an answer that is not stored."""
        with self._transaction() as db:
            self._add(db, server, 0, tokens)

    def spent(self, server: str) -> tuple[int, int]:
        """Return (requests, tokens) so far."""
        with self._transaction() as db:
            return self._spent(db, server)

    def _spent(self, db: sqlite3.Connection, server: str) -> tuple[int, int]:
        row = db.execute("SELECT requests, tokens FROM spent WHERE server = ?", (server,)).fetchone()
        return (0, 0) if row is None else (int(row[0]), int(row[1]))

    def _add(self, db: sqlite3.Connection, server: str, requests: int, tokens: int) -> None:
        db.execute(
            "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT (server) DO UPDATE SET"
            " requests = requests + excluded.requests, tokens = tokens + excluded.tokens",
            (server, requests, tokens),
        )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                with self._db as db:
                    yield db
            except sqlite3.Error as error:
                hint = "is the disk full, or the file damaged?"
                raise StorageUnavailable(f"{self._path}: {error}", hint) from error
