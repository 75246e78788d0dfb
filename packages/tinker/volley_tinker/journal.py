"""Journal of a database: a chained digest of every row that was written, changed or removed.

The writer appends entries in the transaction that makes a change, so a row changed, added or removed by another program
differs from its newest entry. Entries are never changed, and each holds the digest of the one before.

Invariants: every change of a row has an entry; the entry of a removed row has no content. A writer that finds rows
changed since the last writer ended records that in one entry, and continues with them.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from shared.errors import ConfigError

_FIRST = "0" * 64
_CHANGED = "changed "
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS journal ("
    "n INTEGER PRIMARY KEY, name TEXT NOT NULL, key TEXT NOT NULL, content TEXT NOT NULL, digest TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS contents ON journal (name, key, n)",
)
_VERSION = 1
"""The database's user_version once its journal has all rows: without a journal, that was removed."""


@dataclass(frozen=True, slots=True)
class Journaled:
    """Tables of a database: by name the columns whose content counts, the key first."""

    columns: Mapping[str, tuple[str, ...]]

    def open(self, db: sqlite3.Connection) -> None:
        """Prepare a writer's connection: changes are noted until `append`.

        Raises ConfigError if the journal was removed.
        """
        self._is_new(db)  # raises if the journal was removed
        db.execute("CREATE TEMP TABLE touched (name TEXT, key TEXT, UNIQUE (name, key))")
        for name, (key, *rest) in self.columns.items():
            note = "BEGIN INSERT OR IGNORE INTO touched VALUES {}; END"
            new, old = f"('{name}', NEW.{key})", f"('{name}', OLD.{key})"
            db.executescript(
                f"CREATE TEMP TRIGGER {name}_added AFTER INSERT ON main.{name} {note.format(new)};"
                f"CREATE TEMP TRIGGER {name}_removed AFTER DELETE ON main.{name} {note.format(old)};"
                f"CREATE TEMP TRIGGER {name}_changed AFTER UPDATE OF {', '.join((key, *rest))} ON main.{name}"
                f" {note.format(f'{new}, {old}')};"
            )
        db.execute("BEGIN IMMEDIATE")  # one transaction: a start that is killed leaves no journal without its rows
        for statement in _SCHEMA:
            db.execute(statement)
        for name, key in [*self._differing(db)]:
            self._append_entry(db, _CHANGED + name, key, "")
            self._append_entry(db, name, key, self._content(db, name, key))
        db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("COMMIT")

    def append(self, db: sqlite3.Connection) -> None:
        """Append entries for the rows that the open transaction has changed."""
        for name, key in db.execute("SELECT name, key FROM touched ORDER BY name, key").fetchall():
            self._append_entry(db, name, key, self._content(db, name, key))
        db.execute("DELETE FROM touched")

    def problems(self, db: sqlite3.Connection) -> Iterator[str]:
        """Yield broken links between entries, and rows that differ from their newest entry.

        Raises ConfigError if the journal was removed.
        """
        if self._is_new(db):
            for name in self.columns:
                if db.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone():  # noqa: S608 - names of this program
                    yield f"{name} has rows, but the database has no journal"
            return
        before, expected = _FIRST, 1
        for n, *entry, digest in db.execute("SELECT n, name, key, content, digest FROM journal ORDER BY n"):
            if n != expected or _chained(before, *entry) != digest:
                yield f"journal entry {expected} was changed, or an earlier one was removed or added"
                return
            before, expected = digest, expected + 1
        for name, key in self._differing(db):
            yield f"row {key[:100]} of {name} differs from what the server wrote"
        for name, key in db.execute("SELECT name, key FROM journal WHERE name LIKE ?", (f"{_CHANGED}%",)):
            yield f"row {key[:100]} of {name.removeprefix(_CHANGED)} was changed while no server was running"

    @staticmethod
    def _is_new(db: sqlite3.Connection) -> bool:
        """Return True for a database without a journal. Raises ConfigError if it had one."""
        if db.execute("PRAGMA user_version").fetchone()[0] < _VERSION:
            return True
        if not _has_journal(db):
            raise ConfigError("the database has lost its journal", "restore the complete file")
        return False

    def _differing(self, db: sqlite3.Connection) -> Iterator[tuple[str, str]]:
        """Yield table and key of each row that differs from its newest entry."""
        for name in self.columns:
            for row in db.execute(self._select(name)):
                if _newest_content(db, name, row[0]) != _digest(row):
                    yield name, row[0]
            for (one,) in db.execute("SELECT DISTINCT key FROM journal WHERE name = ?", (name,)):
                if _newest_content(db, name, one) and not self._content(db, name, one):
                    yield name, one

    def _select(self, name: str) -> str:
        return f"SELECT {', '.join(self.columns[name])} FROM {name}"  # noqa: S608 - names of this program

    def _content(self, db: sqlite3.Connection, name: str, key: str) -> str:
        """Return the digest of a row's content; empty without such a row."""
        row = db.execute(f"{self._select(name)} WHERE {self.columns[name][0]} = ?", (key,)).fetchone()
        return "" if row is None else _digest(row)

    def _append_entry(self, db: sqlite3.Connection, name: str, key: str, content: str) -> None:
        if _newest_content(db, name, key) == content and not name.startswith(_CHANGED):
            return
        n, before = db.execute("SELECT n, digest FROM journal ORDER BY n DESC LIMIT 1").fetchone() or (0, _FIRST)
        values = (n + 1, name, key, content, _chained(before, name, key, content))
        db.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", values)


def _has_journal(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'journal'").fetchone() is not None


def _newest_content(db: sqlite3.Connection, name: str, key: str) -> str:
    """Return the content in the newest entry of a row; empty without one."""
    newest = "SELECT content FROM journal WHERE name = ? AND key = ? ORDER BY n DESC LIMIT 1"
    row = db.execute(newest, (name, key)).fetchone()
    return "" if row is None else row[0]


def _digest(row: tuple[Any, ...]) -> str:
    plain = [{"sha256": hashlib.sha256(one).hexdigest()} if isinstance(one, bytes) else one for one in row]
    return hashlib.sha256(orjson.dumps(plain)).hexdigest()


def _chained(before: str, name: str, key: str, content: str) -> str:
    return hashlib.sha256(orjson.dumps([before, name, key, content])).hexdigest()
