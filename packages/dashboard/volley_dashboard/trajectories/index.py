"""Index of a run's archived episodes, for lists and filters.

A row for each episode lies in a SQLite file in the user's cache, never in the run's folder. Archived files do not
change, so each is read once. A damaged file is left out and named.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ConfigError, DecodeError, InputError
from shared.run import archive
from shared.run.counted import is_step
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.types import Group, Trajectory, WeightVersion
from volley.layout import CACHE
from volley.runs.run_file import began

_COLUMNS: Mapping[str, str] = {
    "version": "TEXT",
    "step": "INTEGER",
    "ticket": "INTEGER",
    "sample": "INTEGER",
    "env": "TEXT",
    "task": "TEXT",
    "reward": "REAL",
    "success": "INTEGER",
    "status": "TEXT",
    "end": "TEXT",
    "sampled": "INTEGER",
    "tokens": "INTEGER",
    "turns": "INTEGER",
    "sequences": "INTEGER",
    "staleness": "INTEGER",
    "attempt": "INTEGER",
    "failures": "TEXT",
    "logprob": "REAL",
}
SORTS = frozenset(_COLUMNS)
_ORDER = "step, version, ticket, sample"
MOST_ROWS = 500
MAX_TASK = 2000
_SCHEMA = 1
type Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]


class Filters(BaseModel):
    """Conditions that all rows of a list meet; None for no condition.

    The dashboard's search, the options of `volley trajectories` and the arguments of `Client.trajectories` are these
    fields. Bounds are inclusive.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    text: str | None = Field(
        None, max_length=200, description="part of environment, task, end or failure; or a ticket's number"
    )
    env: str | None = Field(None, max_length=200, description="environment, as NAME (all versions) or NAME@VERSION")
    task: str | None = Field(None, max_length=MAX_TASK, description="task, as train/17 or train/17@DIGEST")
    end: str | None = Field(None, max_length=100, description="how the episode ended, as answered")
    success: bool | None = Field(None, description="the episode succeeded")
    failed: bool | None = Field(None, description="attempts failed before the one that was trained on")
    failure: str | None = Field(None, max_length=200, description="error class of a failed attempt, as SandboxFailed")
    ticket: Integer | None = Field(None, description="ticket, whose episodes are a group")
    step_min: Integer | None = Field(None, description="first step that trained on it")
    step_max: Integer | None = Field(None, description="last step that trained on it")
    reward_min: float | None = Field(None, description="smallest reward")
    reward_max: float | None = Field(None, description="largest reward")
    tokens_min: Integer | None = Field(None, description="smallest number of tokens, of all sequences")
    tokens_max: Integer | None = Field(None, description="largest number of tokens, of all sequences")
    staleness_min: Integer | None = Field(None, description="smallest age of its oldest weights, in steps")
    staleness_max: Integer | None = Field(None, description="largest age of its oldest weights, in steps")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Check values by field; texts of numbers are numbers. Raises ConfigError that names the field."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            hint = f"the filters are {', '.join(cls.model_fields)}"
            raise ConfigError(f"filter {name}={str(first['input'])[:100]!r}: {first['msg']}", hint) from None

    def sql(self) -> tuple[str, list[Any]]:
        """Return a WHERE clause and its parameters."""
        parts: list[tuple[str, Any]] = []
        for column, low, high in (
            ("step", self.step_min, self.step_max),
            ("reward", self.reward_min, self.reward_max),
            ("tokens", self.tokens_min, self.tokens_max),
            ("staleness", self.staleness_min, self.staleness_max),
        ):
            parts += [(f"{column} >= ?", low)] if low is not None else []
            parts += [(f"{column} <= ?", high)] if high is not None else []
        for column in ("end", "ticket"):
            parts += [(f'"{column}" = ?', value)] if (value := getattr(self, column)) is not None else []
        parts += [("success = ?", int(self.success))] if self.success is not None else []
        clauses, values = [clause for clause, _ in parts], [value for _, value in parts]
        if self.failed is not None:
            clauses.append("failures != ''" if self.failed else "failures = ''")
        for column, name in (("env", self.env), ("task", self.task)):
            if name is not None:
                clauses.append(f"({column} = ? OR instr({column}, ? || '@') = 1)")
                values += [name, name]
        if self.failure is not None:
            clauses.append("instr(', ' || failures, ?)")
            values.append(f", {self.failure} ")
        if self.text:
            columns = ("env", "task", '"end"', "failures", "ticket")
            clauses.append(f"instr(casefold({' || char(10) || '.join(columns)}), ?)")
            values.append(self.text.casefold())
        return (f"WHERE {' AND '.join(clauses)}" if clauses else ""), values


class Listing(Filters):
    """A page of a filtered list, and its order."""

    sort: str = "step"
    descending: bool = True
    offset: int = Field(0, ge=0, le=2**53)
    limit: int = Field(100, ge=1, le=MOST_ROWS)


class EpisodeIndex:
    """Index of one run. Its methods may be called from several threads."""

    def __init__(self, folder: RunFolder, run: str, cache: Path | None = None) -> None:
        self._folder, self._run = folder, run
        self._lock = threading.Lock()
        self._path = _database(folder, cache or CACHE / "dashboard")
        self._memory: sqlite3.Connection | None = None
        self.damaged: dict[str, str] = {}

    def refresh(self, *, most_files: int | None = None) -> int:
        """Index new files, newest first, at most `most_files`; forget those that are gone. Returns how many remain."""
        with self._lock:
            return self._within(lambda database: self._refresh(database, most_files))

    def _refresh(self, database: sqlite3.Connection, most_files: int | None) -> int:
        known = {row[0] for row in database.execute("SELECT version FROM files")}
        archived = archive.versions(self._folder.archive)
        for gone in known - set(map(str, archived)):
            database.execute("DELETE FROM episodes WHERE version = ?", (gone,))
            database.execute("DELETE FROM files WHERE version = ?", (gone,))
        database.commit()
        waiting = [v for v in archived if str(v) not in known]
        waiting = [v for v in reversed(waiting) if str(v) not in self.damaged]
        for version in waiting[:most_files]:
            self._add(database, version)
        return max(0, len(waiting) - (len(waiting) if most_files is None else most_files))

    def _add(self, database: sqlite3.Connection, version: WeightVersion) -> None:
        marks = ", ".join("?" * len(_COLUMNS))
        try:
            groups = (Group.decode(one) for one in archive.read(self._folder.archive, self._run, version))
            rows = [_row(version, one) for group in groups for one in group.trajectories]
            database.executemany(f"INSERT OR REPLACE INTO episodes VALUES ({marks})", rows)  # noqa: S608 - only marks
        except (DecodeError, OverflowError, ValueError) as error:  # SQLite's integers have 64 bits
            database.rollback()
            self.damaged[str(version)] = str(error)
            return
        database.execute("INSERT OR REPLACE INTO files VALUES (?)", (str(version),))
        database.commit()

    def page(self, asked: Listing) -> dict[str, Any]:
        """Return `{"total", "rows"}` of the episodes that meet the filters. Raises InputError for an unknown column."""
        if asked.sort not in SORTS:
            raise InputError(f"no column is called {asked.sort[:50]}", f"sort by one of {', '.join(sorted(SORTS))}")
        where, values = asked.sql()
        order = f'ORDER BY "{asked.sort}" {"DESC" if asked.descending else "ASC"}, step DESC, ticket, sample'
        ((total,),) = self._rows(f"SELECT count(*) FROM episodes {where}", values)  # noqa: S608
        found = self._rows(
            f"SELECT * FROM episodes {where} {order} LIMIT ? OFFSET ?",  # noqa: S608 - names of columns are ours
            [*values, asked.limit, asked.offset],
        )
        return {"total": total, "rows": [dict(zip(_COLUMNS, row, strict=True)) for row in found]}

    def every(self, filters: Filters) -> Iterator[dict[str, Any]]:
        """Yield all rows that meet the filters, by step, version, ticket and sample."""
        where, values = filters.sql()
        rows = self._rows(f"SELECT * FROM episodes {where} ORDER BY {_ORDER}", values)  # noqa: S608
        yield from (dict(zip(_COLUMNS, row, strict=True)) for row in rows)

    def choices(self) -> dict[str, list[str]]:
        """Return the values of `env` and `end`, and the range of steps."""
        found = {
            column: [row[0] for row in self._rows(f'SELECT DISTINCT "{column}" FROM episodes ORDER BY 1')]  # noqa: S608
            for column in ("env", "end")
        }
        return {column: [value for value in values if value] for column, values in found.items()}

    def environments(self, filters: Filters) -> list[dict[str, Any]]:
        """Summarize the episodes that meet the filters by environment.

        Rows have `env`, `episodes`, `success`, `reward` (mean), `ends` and failed attempts (`failures`) by name.
        """
        where, values = filters.sql()
        counted = self._rows(
            f'SELECT env, "end", failures, count(*), sum(success), sum(reward) FROM episodes {where} GROUP BY 1, 2, 3',  # noqa: S608
            values,
        )
        found: dict[str, _Counts] = {}
        for env, end, failures, n, n_solved, reward in counted:
            found.setdefault(env, _Counts()).add(end, failures, n, n_solved, reward)
        return [{"env": env} | found[env].describe() for env in sorted(found, key=lambda env: -found[env].n)]

    def versions_of(self, ticket: int) -> list[WeightVersion]:
        """Return the versions whose step trained on the ticket, newest first; several if steps were undone."""
        if abs(ticket) >= 2**63:  # SQLite's integers have 64 bits
            return []
        rows = self._rows("SELECT DISTINCT version FROM episodes WHERE ticket = ?", (ticket,))
        return sorted((WeightVersion.parse(row[0]) for row in rows), reverse=True)

    def neighbours(self, version: str, ticket: int) -> dict[str, str | None]:
        """Return the tickets before and after, as VERSION.TICKET: of the same step, else of the next one."""
        step = WeightVersion.parse(version).step
        found: dict[str, str | None] = {}
        for name, sign, order in (("previous", "<", "DESC"), ("next", ">", "ASC")):
            rows = self._rows(
                f"SELECT version, ticket FROM episodes WHERE (step, ticket) {sign} (?, ?)"  # noqa: S608
                f" ORDER BY step {order}, ticket {order} LIMIT 1",
                (step, ticket),
            )
            found[name] = f"{rows[0][0]}.{rows[0][1]}" if rows else None
        return found

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        return self._within(lambda database: database.execute(query, values).fetchall())

    def _within[T](self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do work on the index; if its file cannot be used, as on a full disk, in memory from then on."""
        if self._memory is None:
            try:
                with closing(_opened(self._path)) as database:
                    found = work(database)
                    database.commit()
                    return found
            except (OSError, sqlite3.Error):
                self._memory = _with_tables(sqlite3.connect(":memory:", check_same_thread=False))
        return work(self._memory)


@dataclass(slots=True)
class _Counts:
    """Counts of one environment's episodes."""

    n: int = 0
    n_solved: int = 0
    reward: float = 0.0
    ends: Counter[str] = field(default_factory=Counter[str])
    failures: Counter[str] = field(default_factory=Counter[str])

    def add(self, end: str, failures: str, n: int, n_solved: int, reward: float | None) -> None:
        """Add n episodes. Args: failures: as in the column."""
        self.n, self.n_solved, self.reward = self.n + n, self.n_solved + n_solved, self.reward + (reward or 0.0)
        self.ends[end or "unknown"] += n
        for name, times in (part.rsplit(" ", 1) for part in failures.split(", ") if " " in part):
            self.failures[name] += n * int(times)

    def describe(self) -> dict[str, Any]:
        means = {"success": self.n_solved / self.n, "reward": self.reward / self.n}
        return {"episodes": self.n, **means, "ends": self.ends, "failures": self.failures}


def _opened(path: Path) -> sqlite3.Connection:
    """Open the index's file. Raises OSError, sqlite3.Error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, timeout=30.0)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=OFF")  # an index that is lost is made again
        return _with_tables(database)
    except BaseException:
        database.close()
        raise


def _with_tables(database: sqlite3.Connection) -> sqlite3.Connection:
    database.create_function("casefold", 1, str.casefold, deterministic=True)  # SQLite's `lower` knows only ASCII
    database.execute("CREATE TABLE IF NOT EXISTS files (version TEXT PRIMARY KEY)")
    names = ", ".join(f'"{name}" {kind}' for name, kind in _COLUMNS.items())
    database.execute(f"CREATE TABLE IF NOT EXISTS episodes ({names}, PRIMARY KEY (version, ticket, sample))")
    database.execute("CREATE INDEX IF NOT EXISTS by_step ON episodes (step, ticket, sample)")
    return database


def undone(rows: Sequence[Mapping[str, Any]], head: TrainerState | None) -> list[bool]:
    """Tell for each row if its step was undone after a crash."""
    return [head is not None and not is_step(WeightVersion.parse(row["version"]), head) for row in rows]


def _row(version: WeightVersion, one: Trajectory) -> tuple[Any, ...]:
    sampled = one.stored("loss_mask").astype(bool)
    logprobs = one.stored("logprobs")[sampled]
    return (
        *(str(version), version.step, one.ticket, one.sample_index, one.env, one.task),
        *(one.reward, int(one.success), one.status, one.end or "", int(sampled.sum()), one.n_stored),
        sum(turn.role == "assistant" for sequence in one.sequences() for turn in sequence.turns),
        *(1 + len(one.branches), version.step - 1 - one.oldest().step, one.attempt),
        ", ".join(f"{name} {n}" for name, n in one.failures.items()),
        float(logprobs.mean()) if len(logprobs) else None,
    )


def _database(folder: RunFolder, cache: Path) -> Path:
    """Path of a run's index: it changes if the folder is emptied and a run begins in it again."""
    identity = f"{_SCHEMA}\n{folder.path}\n".encode() + began(folder)
    return cache / f"{hashlib.sha256(identity).hexdigest()[:24]}.sqlite3"
