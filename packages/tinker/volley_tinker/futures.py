"""Database of requests that are answered later (futures), and the ledger of those that were settled.

One SQLite file: the writer appends a row to `ledger` in the transaction that settles a future, and never changes one.
Each row holds the digest of the row before, so rows that were changed, removed or added later are found without the
writer. The rows of all other tables are in a journal of the same kind (see volley_tinker.journal).

Invariants: a request has one row, named by owner and number; a settled future has exactly one ledger row; numbers of a
model's settled requests have no gap.
"""

from __future__ import annotations

import hashlib
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shared.errors import ConfigError, Forbidden
from shared.files.reading import confined, open_file
from shared.files.storage import make_private
from shared.run.folder import RunFolder
from volley_tinker.journal import Journaled

DATABASE, LOCK = "futures.sqlite", "futures.lock"
_BLOCK_BYTES = 2**20
FIRST = "0" * 64
"""Digest before the first row of the ledger."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, created REAL NOT NULL, seen REAL NOT NULL, finished TEXT, described TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, created REAL NOT NULL, seen REAL NOT NULL, spec TEXT NOT NULL,
    state_seq INTEGER, state_file TEXT, state_digest TEXT, state_weights TEXT);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, created REAL NOT NULL, path TEXT, clients INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS futures (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, request TEXT NOT NULL,
    body BLOB, media TEXT NOT NULL, created REAL NOT NULL, settled REAL, outcome TEXT, result BLOB,
    UNIQUE (owner, seq));
CREATE INDEX IF NOT EXISTS pending ON futures (owner, seq) WHERE outcome IS NULL;
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, file TEXT NOT NULL,
    digest TEXT NOT NULL, size INTEGER NOT NULL, created REAL NOT NULL, expires REAL, public INTEGER NOT NULL DEFAULT 0,
    spec TEXT NOT NULL, metadata TEXT);
CREATE TABLE IF NOT EXISTS ledger (
    n INTEGER PRIMARY KEY, future TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    request TEXT NOT NULL, outcome TEXT NOT NULL, result TEXT NOT NULL, weights TEXT NOT NULL, before TEXT NOT NULL,
    digest TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS kept ON futures (settled) WHERE result IS NOT NULL;
CREATE INDEX IF NOT EXISTS settled ON ledger (owner, seq);
"""
"""`state_seq` is the number of the model's last request whose effect on the weights is in `state_file`; `outcome` is
done or failed, NULL until then; `weights` is the checksum of the model's weights after a request that changed them."""
JOURNAL = Journaled(
    {
        "sessions": ("id", "created", "finished", "described"),
        "models": ("id", "session", "created", "spec", "state_seq", "state_file", "state_digest", "state_weights"),
        "samplers": ("id", "session", "created", "path", "clients"),
        "futures": (
            "id",
            "owner",
            "seq",
            "kind",
            "request",
            "body",
            "media",
            "created",
            "settled",
            "outcome",
            "result",
        ),
        "checkpoints": (
            "path",
            "model",
            "kind",
            "name",
            "file",
            "digest",
            "size",
            "created",
            "expires",
            "public",
            "spec",
            "metadata",
        ),
    }
)
"""All but `seen`, which says when a client was last heard of."""
REPLAYED = frozenset({"load_weights", "forward_backward", "optim_step"})
"""Requests that are executed again, from a model's saved state, after a restart."""


class LedgerRow(NamedTuple):
    """A settled future; `request` and `result` are digests in hex."""

    future: str
    owner: str
    seq: int
    kind: str
    request: str
    outcome: str
    result: str
    weights: str

    def digest(self, before: str) -> str:
        """Return the row's digest after the row with the digest `before`."""
        return hashlib.sha256("\n".join([before, *map(str, self)]).encode()).hexdigest()


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open the database; a commit is durable before it returns. Raises ConfigError if it is no database."""
    try:
        if read_only:
            return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        make_private(path)  # SQLite gives its further files the same mode
        connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(SCHEMA)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"{path} cannot be opened: {error}", "is it the database of a Tinker server?") from error
    return connection


def problems(folder: Path) -> Iterator[str]:
    """Check a folder's ledger and journal against its rows, saved states and files; yield what is wrong.

    Raises ConfigError if there is no readable database.
    """
    yield from _foreign(folder)
    connection = connect(folder / DATABASE, read_only=True)
    try:
        connection.execute("BEGIN")  # one snapshot, while a server writes
        yield from _damage(connection)
        yield from _chain(connection)
        yield from JOURNAL.problems(connection)
        yield from _requests(connection)
        yield from _states(connection)
        yield from _files(connection, folder)
    except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{folder / DATABASE} cannot be read: {error}") from error
    finally:
        connection.close()


def counts(folder: Path) -> dict[str, int]:
    """Return how many futures are settled and pending, and how many models there are. Raises ConfigError."""
    connection = connect(folder / DATABASE, read_only=True)
    try:
        settled, pending, models = connection.execute(
            "SELECT (SELECT count(*) FROM ledger), (SELECT count(*) FROM futures WHERE outcome IS NULL),"
            " (SELECT count(*) FROM models)"
        ).fetchone()
    except sqlite3.Error as error:
        raise ConfigError(f"{folder / DATABASE} cannot be read: {error}") from error
    finally:
        connection.close()
    return {"settled": settled, "pending": pending, "models": models}


def _foreign(folder: Path) -> Iterator[str]:
    """Yield records of a run, which no server of Tinker's interface leaves, and a database that is no file."""
    run = RunFolder(folder)
    for path in (run.record, run.ledger, run.metrics, run.archive, run.saved):
        if path.exists():
            yield f"{path.name} is a record of a run, and {DATABASE} one of a Tinker server: one of them is foreign"
    if not stat.S_ISREG((folder / DATABASE).lstat().st_mode):
        raise ConfigError(f"{folder / DATABASE} is not a regular file")


def _damage(connection: sqlite3.Connection) -> Iterator[str]:
    for (found,) in connection.execute("PRAGMA integrity_check(20)"):
        if found != "ok":
            yield f"the database is damaged: {found[:200]}"
    for kind, name in connection.execute("SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'view')"):
        yield f"the database has a {kind} {name[:100]}, which no server makes"


def _chain(connection: sqlite3.Connection) -> Iterator[str]:
    before, expected = FIRST, 1
    for n, *fields, said_before, digest in connection.execute("SELECT * FROM ledger ORDER BY n"):
        if n != expected or said_before != before or LedgerRow(*fields).digest(before) != digest:
            yield f"ledger row {expected}: it was changed, or a row before it was removed or added"
            return
        before, expected = digest, expected + 1


def _requests(connection: sqlite3.Connection) -> Iterator[str]:
    for (future,) in connection.execute(
        "SELECT id FROM futures WHERE outcome IS NOT NULL AND id NOT IN (SELECT future FROM ledger)"
    ):
        yield f"future {future} is settled, and the ledger does not have it"
    for (future,) in connection.execute(
        "SELECT f.id FROM futures f JOIN ledger l ON l.future = f.id WHERE f.outcome IS NULL OR f.outcome != l.outcome"
        " OR f.request != l.request OR f.owner != l.owner OR f.seq != l.seq"
    ):
        yield f"future {future} is not what the ledger says of it"
    for future, result, digest in connection.execute(
        "SELECT f.id, f.result, l.result FROM futures f JOIN ledger l ON l.future = f.id WHERE f.result IS NOT NULL"
    ):
        if not isinstance(result, bytes) or hashlib.sha256(result).hexdigest() != digest:
            yield f"the result of future {future} is not the one that was settled"
    for owner, n, first, last in connection.execute(
        "SELECT owner, count(*), min(seq), max(seq) FROM ledger WHERE owner IN (SELECT id FROM models) GROUP BY owner"
    ):
        if first != 0 or n != last + 1:
            yield f"model {owner}: {n} requests from {first} to {last} are settled, with gaps or twice"


def _states(connection: sqlite3.Connection) -> Iterator[str]:
    for model, seq, weights in connection.execute(
        "SELECT id, state_seq, state_weights FROM models WHERE state_seq IS NOT NULL"
    ):
        row = connection.execute(
            "SELECT weights FROM ledger WHERE owner = ? AND seq <= ? AND weights != '' ORDER BY seq DESC LIMIT 1",
            (model, seq),
        ).fetchone()
        if row is None or row[0] != weights:
            yield f"model {model}: its saved state after request {seq} is not that of the ledger"


def _files(connection: sqlite3.Connection, folder: Path) -> Iterator[str]:
    for what, file, digest in connection.execute(
        "SELECT path, file, digest FROM checkpoints UNION ALL"
        " SELECT id, state_file, state_digest FROM models WHERE state_file IS NOT NULL"
    ):
        try:
            found = file_digest(confined(folder, file))
        except (Forbidden, OSError) as error:
            yield f"{what}: {file[:200]} is missing, or cannot be read: {error}"
        else:
            if found != digest:
                yield f"{what}: {file} has another content than when it was written"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises OSError."""
    found = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()
