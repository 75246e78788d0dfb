"""An SQLite database as a tool.

Queries run in grading processes, bounded in SQLite's instructions, so that machine load never changes an answer. A
writable database is an image that each call receives and returns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from services.env.threads import ThreadRunner
from shared.errors import Busy, GradingBusy, GradingEnded, InputError
from volley_sandbox.grading.pool import GradingPool
from volley_sandbox.tools.base import Arguments, ToolDescription, ToolFault, describe, read_arguments
from volley_sandbox.tools.settings import SqlSettings

_LIBRARY = GradingPool("volley_sandbox.tools.sql_library", wait_s=3.0)
"""Pool whose wait and longest call stay below a client's deadline of a step."""


class SqlArguments(Arguments):
    query: str = Field(max_length=20_000)


_READ = "Runs an SQLite query on a database that cannot be changed. sqlite_master tells its tables."
_WRITE = "Runs SQLite statements on a database that keeps what they change. sqlite_master tells its tables."
SQL_READ, SQL_WRITE = describe("sql", _READ, SqlArguments), describe("sql", _WRITE, SqlArguments)


class SqlSession:
    """The tool `sql` in one episode.

    Args:
        database: the task's own database, JSON text in the library's format, used if the settings name none.
    """

    lane = "sql"

    def __init__(self, settings: SqlSettings, runner: ThreadRunner, database: str | None) -> None:
        self._settings, self._runner = settings, runner
        self._source = _source(settings, database)
        self.tools: tuple[ToolDescription, ...] = (SQL_WRITE if settings.writable else SQL_READ,)

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        query = read_arguments(SqlArguments, arguments).query
        writable, max_rows = self._settings.writable, self._settings.max_rows
        try:
            found: Mapping[str, Any] = await self._runner.run(
                "tool sql", "tool sql", "step", lambda: _LIBRARY.grade("run", self._source, writable, max_rows, query)
            )
        except GradingEnded:
            raise ToolFault("it takes too much memory or time") from None
        except GradingBusy as busy:
            raise Busy(busy.detail, busy.hint, busy.retry_after_s) from busy
        if found["image"] is not None:
            self._source = json.dumps({"image": found["image"]})
        if found["problem"]:
            raise ToolFault("\n".join(part for part in (found["shown"], found["problem"]) if part))
        return found["shown"] or "done"

    async def check(self) -> None:
        """Open the database. Raises InputError if that fails, Busy, Unavailable."""
        arguments = (self._source, self._settings.writable, self._settings.max_rows)
        try:
            await self._runner.run("tool sql", "tool sql", "load", lambda: _LIBRARY.call("prepare", *arguments))
        except GradingEnded:
            raise InputError("the database of the tool sql needs too much memory", "use a smaller one") from None

    async def close(self) -> None:
        """Do nothing: the session holds no resources."""


def _source(settings: SqlSettings, database: str | None) -> str:
    if settings.database is not None:
        return json.dumps({"file": str(settings.database)})
    if settings.script is None and database is not None:
        return database
    return json.dumps({"schema": settings.script or ""})
