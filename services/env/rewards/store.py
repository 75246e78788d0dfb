"""What judges and reward services have answered, and what that has cost: an SQLite file in the run's folder.

Invariant: an answer is on disk before it is used, so that no process asks for it again.
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
    """See `SpendingStore`; and the answers."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _ANSWERS)

    def find(self, key: bytes) -> str | None:
        """What was answered; None if it never was."""
        with self._transaction() as db:
            row = db.execute("SELECT said FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: bytes, server: str, said: str, tokens: int) -> str:
        """An answer, and the tokens it has cost; returns what is kept: what another process answered before, if so."""
        at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        with self._transaction() as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?)", (key, server, said, tokens, at))
            self._add(db, server, 0, tokens)
            return str(db.execute("SELECT said FROM answers WHERE key = ?", (key,)).fetchone()[0])
