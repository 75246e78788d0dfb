"""SQLite file of the answers of judges and reward services, and their costs.

Invariant: an answer is on disk before it is used, so that no process repeats the question.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from shared.files.spending import SpendingStore

_ANSWERS = """
CREATE TABLE IF NOT EXISTS answers
    (key BLOB PRIMARY KEY, server TEXT, said TEXT, tokens INTEGER, at TEXT) WITHOUT ROWID;
"""


class RewardStore(SpendingStore):
    """`SpendingStore` that also holds the answers."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _ANSWERS)

    def find(self, key: bytes) -> str | None:
        """Stored answer; None if there is none."""
        with self._transaction() as db:
            row = db.execute("SELECT said FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: bytes, server: str, text: str, tokens: int) -> str:
        """Store an answer and its tokens. Returns the stored answer, which another process may have stored before."""
        at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        with self._transaction() as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?)", (key, server, text, tokens, at))
            self._add(db, server, 0, tokens)
            return str(db.execute("SELECT said FROM answers WHERE key = ?", (key,)).fetchone()[0])
