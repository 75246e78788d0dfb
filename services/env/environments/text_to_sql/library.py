"""SQLite as the judge of text-to-SQL; runs in a grading process (services/env/grading), never in the service.

Two queries agree when the sets of their result rows are equal: BIRD's execution accuracy (Li et al. 2023,
evaluation.py: `set(predicted_res) == set(ground_truth_res)`), so order and repetitions of rows do not count.

A query of a model may only read: the database is opened read-only, and an authorizer refuses everything but SELECT,
reading columns, and functions that touch neither files nor extensions. Its work is bounded in SQLite's instructions, so
that a busy machine never changes a verdict; its memory and processor time by the process.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shared.errors import InputError

MAX_ROWS = 10_000
MAX_INSTRUCTIONS = 20_000_000
"""A second or two."""

INSTRUCTIONS_PER_CALL = 1000
_SHOWN_ROWS = 5
_SHOWN_CHARACTERS = 600
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
DENIED_FUNCTIONS = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
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
    """What a query gave. `problem` says why it gave nothing."""

    rows: tuple[tuple[Any, ...], ...] = ()
    problem: str = ""


def describe(source: str) -> str:
    """The CREATE statements of a database. Raises InputError when it cannot be opened."""
    connection = open_source(source)
    try:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
    except sqlite3.Error as error:
        raise InputError(f"a database cannot be read: {error}") from error
    finally:
        connection.close()
    return "\n".join(f"{sql};" for (sql,) in found)


def prepare(source: str, gold: str) -> None:
    """Runs the gold query. Raises InputError when it fails, so that no answer is graded against it."""
    _gold(source, gold)


def grade(source: str, gold: str, query: str) -> dict[str, Any]:
    """Whether `query` gives the rows that `gold` gives, why it could not be run, and its first rows as text.

    Args: source: {"schema": SQL that makes the database} or {"file": path}, as JSON text.
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
        raise InputError(f"the gold query of a task fails: {found.problem}", f"mend it: {gold[:200]}")
    return frozenset(found.rows)


def _run(source: str, query: str) -> Rows:
    connection = open_source(source)
    left = MAX_INSTRUCTIONS // INSTRUCTIONS_PER_CALL

    def count() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    try:
        for limit, value in SQLITE_LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_progress_handler(count, INSTRUCTIONS_PER_CALL)
        connection.set_authorizer(authorize_reading)
        rows = connection.execute(query).fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        return Rows(problem="it takes too many steps" if left < 0 else str(error)[:_SHOWN_CHARACTERS])
    finally:
        connection.close()
    return Rows(problem=f"it gives more than {MAX_ROWS} rows") if len(rows) > MAX_ROWS else Rows(tuple(rows))


def open_source(source: str) -> sqlite3.Connection:
    """A connection that cannot write. A schema's database is made anew in memory, of a file no lock is taken."""
    match json.loads(source):
        case {"schema": str(script)}:
            connection = sqlite3.connect(":memory:")
            try:
                connection.executescript(script)
            except sqlite3.Error as error:
                connection.close()
                raise InputError(f"the schema of a task cannot be made: {error}", script[:200]) from error
        case {"file": str(path)}:
            try:
                connection = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
            except sqlite3.Error as error:
                raise InputError(f"the database {path} cannot be opened: {error}") from error
        case other:
            raise InputError(f"{str(other)[:80]!r} is no database")
    connection.text_factory = _text
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def _text(raw: bytes) -> str:
    """Real databases hold bytes that are no UTF-8."""
    return raw.decode(errors="replace")


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
