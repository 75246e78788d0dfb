"""SQLite as a tool; runs in a grading process (volley_sandbox/grading), never in the service.

A source is JSON text: {"schema": SQL} or {"file": path} as in text-to-SQL, or {"image": base64}, a database written by
`Connection.serialize`. Read-only queries are bounded as there. A writable database is in memory, bounded in size, and
returned as the next call's image, so a killed call changes nothing.
"""

from __future__ import annotations

import base64
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from shared.errors import InputError
from volley_sandbox.grading.fixed_clock import fix_clock
from volley_sandbox.grading.sql_library import (
    SQLITE_LIMITS,
    StepBound,
    authorize_reading,
    authorize_writing,
    open_source,
    prepare_connection,
)

MAX_PAGES, PAGE = 128, 4096
"""Limit of a writable database: half a megabyte."""
MAX_SHOWN, MAX_SHOWN_BYTES = 2**17, 300_000
"""Limits of the answer's text, in characters, and in bytes as JSON, because it shares the answer with an image."""
_MAX_CELL = 2000


def prepare(source: str, writable: bool, max_rows: int) -> None:
    """Open the database. Raises InputError if that fails."""
    with closing(_opened(source, writable)) as connection:
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            raise InputError(f"the database cannot be read: {error}", source[:200]) from error


def run(source: str, writable: bool, max_rows: int, sql: str) -> dict[str, Any]:
    """Run statements.

    Returns {"shown": the rows as text, "problem": reason for a failure, "image": the database afterwards, if it is
    writable}.
    """
    connection = _opened(source, writable)
    steps = StepBound(connection)
    shown: list[str] = []
    problem = ""
    try:
        for limit, value in SQLITE_LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(_authorize_changes if writable else _authorize_queries)
        for statement in _statements(sql):
            shown.append(_result(connection.execute(statement), max_rows))
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        problem = steps.explain(error)[:600]
    steps.lift()
    connection.set_authorizer(None)
    problem = _committed(connection) or problem
    image = _image(connection) if writable else None
    connection.close()
    return {"shown": _cut("\n".join(part for part in shown if part)), "problem": problem, "image": image}


def _opened(source: str, writable: bool) -> sqlite3.Connection:
    match json.loads(source):
        case {"image": str(image)}:
            connection = sqlite3.connect(":memory:")
            connection.deserialize(base64.b64decode(image))
            prepare_connection(connection)
        case _:
            connection = open_source(source)
    fix_clock(connection)
    connection.isolation_level = None
    connection.execute("PRAGMA query_only = OFF" if writable else "PRAGMA query_only = ON")
    (pages,) = connection.execute(f"PRAGMA max_page_count = {MAX_PAGES}").fetchone() if writable else (0,)
    if pages > MAX_PAGES:
        connection.close()
        raise InputError(f"the database has {pages} pages of {PAGE} bytes; a writable one has at most {MAX_PAGES}")
    return connection


def _is_random(action: int, name: str | None) -> bool:
    return action == sqlite3.SQLITE_FUNCTION and (name or "").lower() in ("random", "randomblob")


def _authorize_queries(action: int, *about: str | None) -> int:
    """Authorize reading, except with random functions, so that equal queries give equal rows."""
    return sqlite3.SQLITE_DENY if _is_random(action, about[1]) else authorize_reading(action, *about)


def _authorize_changes(action: int, *about: str | None) -> int:
    return sqlite3.SQLITE_DENY if _is_random(action, about[1]) else authorize_writing(action, *about)


def _committed(connection: sqlite3.Connection) -> str:
    """Commit an open transaction; return the reason if that fails, else ""."""
    try:
        if connection.in_transaction:
            connection.commit()
    except sqlite3.Error as error:
        connection.rollback()
        return f"the transaction cannot be kept: {error}"[:600]
    return ""


def _image(connection: sqlite3.Connection) -> str | None:
    """Image of the database; None if nothing was ever written to it, which SQLite cannot serialize."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    return base64.b64encode(connection.serialize()).decode() if pages else None


def _statements(script: str) -> Iterator[str]:
    """Split a script into statements; a semicolon inside a text or a trigger does not end one."""
    begin = 0
    for at, character in enumerate(script):
        if character == ";" and sqlite3.complete_statement(script[begin : at + 1]):
            yield script[begin : at + 1]
            begin = at + 1
    if script[begin:].strip():
        yield script[begin:]


def _result(cursor: sqlite3.Cursor, max_rows: int) -> str:
    """Rows of a statement under their column names, or its row count."""
    if cursor.description is None:
        return f"{cursor.rowcount} rows changed" if cursor.rowcount >= 0 else "done"
    rows = cursor.fetchmany(max_rows + 1)
    lines = [" | ".join(str(column[0]) for column in cursor.description)]
    lines += [" | ".join(_cell(value) for value in row) for row in rows[:max_rows]]
    summary = f"(the first {max_rows} rows)" if len(rows) > max_rows else f"({len(rows)} row{'s'[: len(rows) != 1]})"
    return "\n".join([*lines, summary])


def _cell(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}[… the first {_MAX_CELL} of {len(text)} characters]"


def _cut(text: str) -> str:
    """Truncate text to fit an answer, with a note."""
    n = min(len(text), MAX_SHOWN)
    while len(json.dumps(text[:n])) > MAX_SHOWN_BYTES:
        n = n * 3 // 4
    return text if n == len(text) else f"{text[:n]}\n[… only the first {n} of {len(text)} characters are shown]"
