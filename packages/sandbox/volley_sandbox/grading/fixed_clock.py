"""SQLite's date and time functions with a fixed clock. Equal queries give equal rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

NOW = "2000-01-01 00:00:00"
_FUNCTIONS = {"date": 0, "time": 0, "datetime": 0, "julianday": 0, "unixepoch": 0, "strftime": 1}
"""Position of each function's time argument; without that argument it uses the present."""


def fix_clock(connection: sqlite3.Connection) -> None:
    """Fix the clock of `connection` at NOW. SQLite's own functions do the rest."""
    clock = sqlite3.connect(":memory:")
    for name, at in _FUNCTIONS.items():
        connection.create_function(name, -1, _with_fixed_now(clock, name, at), deterministic=True)
    for name, length in (
        ("current_date", slice(10)),
        ("current_time", slice(11, None)),
        ("current_timestamp", slice(None)),
    ):
        connection.create_function(name, 0, lambda length=length: NOW[length], deterministic=True)


def _with_fixed_now(clock: sqlite3.Connection, name: str, at: int) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        given = [value.decode(errors="replace") if isinstance(value, bytes) else value for value in arguments]
        modifier = given[at].lower() if len(given) > at and isinstance(given[at], str) else ""
        if len(given) == at or modifier in ("subsec", "subsecond"):
            given.insert(at, NOW)
        elif modifier == "now":
            given[at] = NOW
        return clock.execute(f"SELECT {name}({', '.join('?' * len(given))})", given).fetchone()[0]

    return call
