"""Durable records beside the queue: one SQLite file, written by one thread.

Invariants
- A write is on disk (WAL, synchronous=FULL) before its future is done; all statements of one write are there, or none.
- Writes that wait together are committed together, so that many writers share one fsync.
- `later` queues a write that may be lost in a crash: it goes with the next commit.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, StorageUnavailable, Unavailable
from shared.files import locks
from shared.files.storage import make_private

type Statement = tuple[str, Sequence[Any]]
type Work[T] = Callable[[sqlite3.Connection], T]

_MOST_TOGETHER = 512


@dataclass(slots=True)
class _Job:
    work: Work[Any]
    done: Callable[[Any, Exception | None], None] | None


class RecordStore:
    """The file and its thread. Only one process at a time can have it open.

    Args:
        tables: SQL statements that create the tables, if they are not there.

    Raises Unavailable if another process has it open, StorageUnavailable, and ConfigError if it is no SQLite database.
    """

    def __init__(self, path: Path, tables: str) -> None:
        self._path, self._jobs = path, queue.SimpleQueue[_Job | None]()
        self._lock = locks.lock_file(path.with_suffix(".lock"))
        try:
            if not locks.try_lock(self._lock):
                raise Unavailable(f"another orchestrator has {path} open", "give each orchestrator its own run.dir")
            self._db = _opened(path, tables)
        except BaseException:
            os.close(self._lock)
            raise
        self._thread = threading.Thread(target=self._serve, name="records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the writes that wait, and close the file; blocks."""
        self._jobs.put(None)
        self._thread.join()
        self._db.close()
        os.close(self._lock)

    async def write(self, *statements: Statement) -> None:
        """Return once all statements are on disk. Raises StorageUnavailable; then none of them is."""
        await self.run(lambda db: _execute(db, statements))

    async def run[T](self, work: Work[T]) -> T:
        """Run `work` in the thread, within a transaction of its own; return once it is on disk."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def done(value: T, error: Exception | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)

        def hand_over(value: Any, error: Exception | None) -> None:
            loop.call_soon_threadsafe(done, value, error)

        self._jobs.put(_Job(work, hand_over))
        return await future

    def later(self, *statements: Statement) -> None:
        """Write with one of the next commits; a crash may lose it."""
        self._jobs.put(_Job(lambda db: _execute(db, statements), None))

    def _serve(self) -> None:
        open_ = True
        while open_:
            jobs = [self._jobs.get()]
            while len(jobs) < _MOST_TOGETHER and jobs[-1] is not None and not self._jobs.empty():
                jobs.append(self._jobs.get())
            if jobs[-1] is None:
                open_ = False
            self._commit([job for job in jobs if job is not None])

    def _commit(self, jobs: Sequence[_Job]) -> None:
        """Run jobs in one transaction. One that fails is undone alone; if the commit fails, all are."""
        ended = list[tuple[_Job, Any, Exception | None]]()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for job in jobs:
                ended.append((job, *self._run(job.work)))
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            ended = [(job, None, self._translated(error)) for job in jobs]
        for job, value, failure in ended:
            if job.done is not None:
                try:
                    job.done(value, failure)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    continue

    def _run(self, work: Work[Any]) -> tuple[Any, Exception | None]:
        self._db.execute("SAVEPOINT job")
        try:
            value, failure = work(self._db), None
        except sqlite3.Error as error:
            value, failure = None, self._translated(error)
        except Exception as error:  # noqa: BLE001 - the waiting caller gets it
            value, failure = None, error
        if failure is not None:
            self._db.execute("ROLLBACK TO job")
        self._db.execute("RELEASE job")
        return value, failure

    def _translated(self, error: sqlite3.Error) -> StorageUnavailable:
        return StorageUnavailable(f"{self._path}: {error}", "is the disk full, or the file damaged?")


def _opened(path: Path, tables: str) -> sqlite3.Connection:
    try:
        make_private(path)  # it may hold secrets
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(tables)
    except (sqlite3.OperationalError, OSError) as error:
        raise StorageUnavailable(f"{path}: {error}", "is the disk full, or the folder read-only?") from error
    except sqlite3.DatabaseError as error:
        hint = "restore the file, or remove it: what it records is then lost, and these episodes begin again"
        raise ConfigError(f"{path} cannot be read: {error}", hint) from error
    return db


def _execute(db: sqlite3.Connection, statements: Sequence[Statement]) -> None:
    for sql, values in statements:
        db.execute(sql, values)
