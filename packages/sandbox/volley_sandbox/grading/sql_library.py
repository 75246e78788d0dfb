"""SQLite as the judge of text-to-SQL; runs in a grading process (volley_sandbox/grading), never in the service.

Two queries agree if the sets of their result rows are equal: BIRD's execution accuracy (Li et al. 2023, evaluation.py:
`set(predicted_res) == set(ground_truth_res)`), so order and repetitions of rows do not count. A model's query may only
read: the database is opened read-only, and an authorizer rejects everything but SELECT, reading columns, and functions
that touch neither files nor extensions. Its work is bounded in SQLite's instructions, so that machine load never
changes a verdict; the process bounds its memory and CPU time.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from shared.errors import InputError
from volley_sandbox.grading.fixed_clock import fix_clock

MAX_ROWS = 10_000
MAX_INSTRUCTIONS = 20_000_000
"""Instructions of SQLite, about a second or two."""

INSTRUCTIONS_PER_CALL = 1000
_SHOWN_ROWS = 5
_SHOWN_CHARACTERS = 600
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
DENIED_FUNCTIONS = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
_DENIED_WRITING = frozenset({sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA})
_SCHEMA_PRAGMAS = frozenset({"foreign_keys", "defer_foreign_keys", "encoding", "user_version", "application_id"})
MAX_SCHEMA_PAGES = 2**16
"""Limit of a schema's database, in pages of 4096 bytes."""
SQLITE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a query. `problem` is the reason if it failed."""

    rows: tuple[tuple[Any, ...], ...] = ()
    problem: str = ""


def describe(source: str) -> str:
    """CREATE statements of a database. Raises InputError if it cannot be opened."""
    connection = open_source(source)
    try:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
    except sqlite3.Error as error:
        raise InputError(f"a database cannot be read: {error}") from error
    finally:
        connection.close()
    return "\n".join(f"{sql};" for (sql,) in found)


def prepare(source: str, gold: str) -> None:
    """Run the gold query. Raises InputError if it fails, so that no answer is graded against it."""
    _gold(source, gold)


def grade(source: str, gold: str, query: str) -> dict[str, Any]:
    """Compare the rows of `query` with those of `gold`; also return its failure and its first rows as text.

    Args:
        source: {"schema": SQL that makes the database} or {"file": path}, as JSON text.
    """
    found = _run(source, query)
    return {
        "match": not found.problem and set(found.rows) == _gold(source, gold),
        "problem": found.problem,
        "n_rows": len(found.rows),
        "shown": _shown(found.rows),
    }


@lru_cache(maxsize=1024)
def _gold(source: str, gold: str) -> frozenset[tuple[Any, ...]]:
    found = _run(source, gold)
    if found.problem:
        raise InputError(f"the gold query of a task fails: {found.problem}", f"fix it: {gold[:200]}")
    return frozenset(found.rows)


def _run(source: str, query: str) -> Rows:
    connection = open_source(source)
    steps = StepBound(connection)
    try:
        for limit, value in SQLITE_LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(authorize_reading)
        rows = connection.execute(query).fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        return Rows(problem=steps.explain(error)[:_SHOWN_CHARACTERS])
    finally:
        connection.close()
    return Rows(problem=f"it gives more than {MAX_ROWS} rows") if len(rows) > MAX_ROWS else Rows(tuple(rows))


class StepBound:
    """Interrupt a connection after MAX_INSTRUCTIONS, over its whole life or until `lift`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._left = MAX_INSTRUCTIONS // INSTRUCTIONS_PER_CALL
        connection.set_progress_handler(self._count, INSTRUCTIONS_PER_CALL)

    def explain(self, error: Exception) -> str:
        """Reason why a statement failed; never empty."""
        if self._left < 0:
            return "it takes too many steps"
        return "it takes too much memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__

    def lift(self) -> None:
        self._connection.set_progress_handler(None, 0)

    def _count(self) -> bool:
        self._left -= 1
        return self._left < 0


def open_source(source: str) -> sqlite3.Connection:
    """Open a read-only connection. A schema's database is made in memory; a file is not locked.

    The SQL of a schema may come from a request, so it opens no other file, and its steps and the size of its database
    are bounded. Raises InputError.
    """
    match json.loads(source):
        case {"schema": str(script)}:
            connection = sqlite3.connect(":memory:")
            connection.execute(f"PRAGMA max_page_count = {MAX_SCHEMA_PAGES}")
            fix_clock(connection)
            steps = StepBound(connection)
            connection.set_authorizer(_authorize_schema)
            try:
                connection.executescript(script)
            except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
                connection.close()
                raise InputError(f"the SQL of a task's schema fails: {steps.explain(error)}", script[:200]) from error
            steps.lift()
            connection.set_authorizer(None)
        case {"file": str(path)}:
            try:
                connection = sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)
            except sqlite3.Error as error:
                raise InputError(f"the database {path} cannot be opened: {error}") from error
        case other:
            raise InputError(f"{str(other)[:80]!r} is not a database")
    prepare_connection(connection)
    connection.execute("PRAGMA query_only = ON")
    return connection


def prepare_connection(connection: sqlite3.Connection) -> None:
    """Accept text with any bytes, and keep temporary data in memory."""
    connection.text_factory = _text
    connection.execute("PRAGMA temp_store = MEMORY")


def _text(raw: bytes) -> str:
    """Decode text, because real databases hold invalid UTF-8."""
    return raw.decode(errors="replace")


def authorize_writing(action: int, _1: str | None, second: str | None, _2: str | None, _3: str | None) -> int:
    """Authorize everything except other files and settings of the connection."""
    if action in _DENIED_WRITING or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in DENIED_FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _authorize_schema(
    action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
) -> int:
    """Authorize writing, and the pragmas in a dump of a database."""
    if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in _SCHEMA_PRAGMAS:
        return sqlite3.SQLITE_OK
    return authorize_writing(action, first, second, database, trigger)


def authorize_reading(
    action: int, _first: str | None, second: str | None, _database: str | None, _trigger: str | None
) -> int:
    if action in _ALLOWED:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in DENIED_FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _shown(rows: tuple[tuple[Any, ...], ...]) -> str:
    lines = [" | ".join(str(value) for value in row) for row in rows[:_SHOWN_ROWS]]
    return "\n".join(lines)[:_SHOWN_CHARACTERS]
