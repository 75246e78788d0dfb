"""Text-to-SQL tasks as files: one JSON object per line, with the keys of BIRD and Spider, or with the schema as SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ConfigError
from volley_environments.problem_files import read_rows

FORMAT = 'write lines like {"question": "…", "sql": "SELECT …", "schema": "CREATE TABLE …"}, or "db_id" for "schema"'


@dataclass(frozen=True, slots=True)
class SqlTask:
    """`source` names the database for `library.py`; `shown` holds its CREATE statements, empty if they must be read."""

    question: str
    sql: str
    source: Mapping[str, str]
    shown: str = ""

    @property
    def database(self) -> str:
        """`source` as JSON text."""
        return orjson.dumps(dict(self.source), option=orjson.OPT_SORT_KEYS).decode()


@lru_cache(maxsize=8)
def read_tasks(path: Path, databases: Path | None) -> tuple[SqlTask, ...]:
    """Read all tasks of a JSONL file, cached for the process. Raises ConfigError naming the file and the line."""
    hint = "point data.train and data.eval to JSONL files"
    return read_rows(path, lambda row, where: _task(row, where, databases), noun="tasks", hint=hint)


def _task(row: Mapping[str, Any], where: str, databases: Path | None) -> SqlTask:
    sql = row.get("sql") or row.get("SQL") or row.get("query")
    match {**row, "sql": sql}:
        case {"question": str(question), "sql": str(sql), "db_id": str(name), "schema": str(schema)} if databases:
            return SqlTask(_with_evidence(question, row), sql, {"file": str(_database(name, where, databases))}, schema)
        case {"question": str(question), "sql": str(sql), "schema": str(schema)}:
            return SqlTask(_with_evidence(question, row), sql, {"schema": schema})
        case {"question": str(question), "sql": str(sql), "db_id": str(name)}:
            return SqlTask(_with_evidence(question, row), sql, {"file": str(_database(name, where, databases))})
        case _:
            raise ConfigError(f"{where} is not a text-to-SQL task", FORMAT)


def _with_evidence(question: str, row: Mapping[str, object]) -> str:
    evidence = row.get("evidence")
    return f"{question}\n{evidence}" if isinstance(evidence, str) and evidence else question


def _database(name: str, where: str, databases: Path | None) -> Path:
    """Path of a database in the layout of BIRD and Spider: NAME/NAME.sqlite in one folder."""
    if databases is None:
        raise ConfigError(f"{where} names the database {name!r}", "set databases to the folder that holds it")
    path = databases / name / f"{name}.sqlite"
    if Path(name).name != name or not path.is_file():
        raise ConfigError(
            f"{where}: there is no database {path}", "put NAME/NAME.sqlite for each db_id into the folder databases"
        )
    return path.resolve()


def databases_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the databases that the tasks of a configuration name. Raises ConfigError."""
    if not config.get("databases"):
        return
    files = [Path(path) for part in ("train", "eval") if isinstance(path := config.get(part), str)]
    tasks = (task for file in files for task in read_tasks(file, Path(config["databases"])))
    for file in sorted({Path(task.source["file"]) for task in tasks if "file" in task.source}):
        yield f"databases/{file.name}", file
