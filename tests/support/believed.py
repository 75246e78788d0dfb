"""Everything in a run's folder that a reader believes, and a seeded mutator that walks it.

`BELIEVED` says of each file and field which record contradicts a change of it, or which sentence of docs/security.md
says that nothing does. `mutations` changes every one: other values, swapped and removed fields; lines removed,
repeated, swapped; files cut, emptied, removed; rows of a database changed, added, removed. A mutation is *named* if the
proof reports it or the folder cannot be read, *without effect* if proof and report say what they said before, and else
*believed*.

`python -m tests.support.believed [SEED [MOST_OF_AN_ENTRY]]` makes the folders, tries them, and prints the list with
counts.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson
import yaml

from shared.errors import VolleyError
from shared.run.folder import RunFolder
from tests.support.mutations import other
from volley_dashboard.report import report
from volley_proof.verify import command
from volley_tinker import futures

type Outcome = Literal["named", "without effect", "believed"]
type Change = Callable[[Path], object]


class Entry(NamedTuple):
    """`what` is FILE:FIELD, both patterns; `against` the record that contradicts it, or None with a sentence."""

    what: str
    against: str | None
    sentence: str = ""


class Mutation(NamedTuple):
    """`what` is FILE:FIELD; FIELD is empty for a change of lines or of the whole file."""

    what: str
    how: str
    change: Change


_STATES = "commit records and state.json of later steps, and each other"
_HELD = "its digest in commit records and state.json (`files`)"
_ADDRESSES = "Addresses, limits and memory placement in `config.yaml`"
_MACHINE = "In `run.json`, the digest of the configuration, the software versions, times and folders"
_ENDED = "`finished` in `run.json` set back to false"
_RETAINED = "How many checkpoints are retained"
_HANDOVERS = "The lines of `handovers.jsonl`"
_BUCKET = "`bucket.json`"
_PATHS = "The paths in `environments/data.json`, and environments that no evaluation measured"
_SUBMISSION = "The record of a submitted environment (`environments/NAME/VERSION/record.json`) and its failures"
_SEEN = "When a Tinker client was last heard of"

BELIEVED: tuple[Entry, ...] = (
    Entry("config.yaml:run.dir", None, _ADDRESSES),
    Entry("config.yaml:*", "settings in commit records and state.json, and run.json"),
    *(Entry(f"run.json:{key}", None, _MACHINE) for key in ("digest", "versions*", "created", "elapsed_s", "cwd")),
    Entry("run.json:amendments*", "settings in state.json"),
    Entry("run.json:finished", None, _ENDED),
    Entry("run.json:*", "settings, seed, origin and version in commit records and state.json"),
    Entry("ledger.jsonl:*", "chain in commit records and state.json, and the archive"),
    Entry("metrics.jsonl:*", "chain in commit records and state.json"),
    Entry("evals.jsonl:*", f"{_HELD}; but the newest lines"),
    Entry("samples.jsonl:*", f"{_HELD}; but the newest lines"),
    Entry("mixture.jsonl:*", f"{_HELD}, and the archived groups; but the newest lines"),
    Entry("refused.jsonl:*", f"{_HELD}, refused/ and the ledger"),
    Entry("refused/*", "refused.jsonl and the digests in the ledger"),
    Entry("checkpoints.jsonl:*", f"{_HELD}, and the manifests"),
    Entry("handovers.jsonl:*", None, _HANDOVERS),
    Entry("fork.json:*", f"{_HELD}, and fork points in state.json"),
    Entry("archive/*.zst", "the digest of each group in ledger.jsonl"),
    Entry("archive/*.json:*", f"its own seal, {_STATES}"),
    Entry("checkpoints/*/state.json:*", "manifest.json and the commit record of its version"),
    Entry("checkpoints/*/manifest.json:", None, _RETAINED),
    Entry("checkpoints/*/manifest.json:*", "checkpoints.jsonl and its seal in state.json"),
    Entry("checkpoints/*", "manifest.json and state.json; of a Tinker server, digests in its table `checkpoints`"),
    Entry("environments/data.json:*source", None, _PATHS),
    Entry("environments/data.json:*", "digests in evals.jsonl, and the code of submitted environments"),
    Entry("environments/*/record.json:*", None, _SUBMISSION),
    Entry("environments/*/source/*", "environments/data.json and digests in evals.jsonl"),
    Entry("bucket.json:*", None, _BUCKET),
    Entry("futures.sqlite:ledger.*", "its own chain, and the table `futures`"),
    Entry("futures.sqlite:journal.*", "its own chain, and the rows of all tables"),
    Entry("futures.sqlite:sessions.seen", None, _SEEN),
    Entry("futures.sqlite:models.seen", None, _SEEN),
    Entry("futures.sqlite:*", "the journal"),
    Entry("states/*", "digests in the table `models`"),
)
NOT_BELIEVED = (
    ".lock",
    ".secrets/*",
    "logs/*",
    "*.lock",
    f"{futures.DATABASE}-*",
    "summary.json",
    "plot.png",
    ".beginning",
)
"""No output of verify, report or status is derived from these."""


def entry_of(what: str) -> Entry | None:
    """First entry that fits; None if the list has none."""
    return next((one for one in BELIEVED if fnmatchcase(what, one.what) or fnmatchcase(what, f"{one.what}:")), None)


# What may be changed.


def mutations(folder: Path, rng: random.Random) -> Iterator[Mutation]:
    """All mutations of a folder: every file, every field."""
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = path.relative_to(folder).as_posix()
        if any(fnmatchcase(name, one) for one in NOT_BELIEVED):
            continue
        if name == futures.DATABASE:
            yield from _of_database(path, rng)
        elif path.suffix == ".jsonl":
            yield from _of_lines(name, path, rng)
        elif path.suffix in (".json", ".yaml"):
            yield from _of_tree(name, path, rng)
        if name != futures.DATABASE:
            yield from _of_file(name, path, rng)


def _of_file(name: str, path: Path, rng: random.Random) -> Iterator[Mutation]:
    at = rng.random()
    what = name if path.suffix not in (".json", ".jsonl", ".yaml") else f"{name}:"
    yield Mutation(what, "removed", lambda run: (run / name).unlink())
    if text := path.read_bytes():
        yield Mutation(what, "emptied", lambda run: _put(run / name, b""))
        yield Mutation(what, "cut", lambda run: _put(run / name, text[: len(text) // 2]))
        yield Mutation(what, "byte flipped", lambda run: _put(run / name, _flipped(text, at)))
    twin = next((one for one in sorted(path.parent.iterdir()) if one.suffix == path.suffix and one != path), None)
    if twin is not None and twin.is_file() and twin.read_bytes() != text:
        yield Mutation(
            what, f"swapped with {twin.name}", lambda run: _swapped(run / name, (run / name).parent / twin.name)
        )


def _of_tree(name: str, path: Path, rng: random.Random) -> Iterator[Mutation]:
    load, dump = (orjson.loads, orjson.dumps) if path.suffix == ".json" else (yaml.safe_load, _yaml)
    for leaf in _leaves(tree := load(path.read_bytes())):
        what = f"{name}:{_named(leaf)}"
        for how, change in _changes(tree, leaf, rng):
            yield Mutation(
                what, how, lambda run, change=change: _put(run / name, dump(change(load(path.read_bytes()))))
            )


def _of_lines(name: str, path: Path, rng: random.Random) -> Iterator[Mutation]:
    lines = [one for one in path.read_bytes().splitlines() if one.strip()]
    if not lines:
        return

    def put(run: Path, found: Sequence[bytes]) -> None:
        _put(run / name, b"".join(one + b"\n" for one in found))

    places = sorted({0, len(lines) // 2, len(lines) - 1})
    for n in places:
        yield Mutation(
            f"{name}:",
            f"removed in line {n + 1} of {len(lines)}",
            lambda run, n=n: put(run, lines[:n] + lines[n + 1 :]),
        )
        yield Mutation(f"{name}:", f"line {n + 1} twice", lambda run, n=n: put(run, [*lines[: n + 1], *lines[n:]]))
    if len(lines) > 1:
        yield Mutation(f"{name}:", "order", lambda run: put(run, lines[::-1]))
    fields = {_named(leaf): leaf for one in lines for leaf in _leaves(orjson.loads(one))}
    for field, leaf in fields.items():
        holders = [n for n, one in enumerate(lines) if leaf in [*_leaves(orjson.loads(one))]]
        at = rng.choice(holders)
        for how, change in _changes(orjson.loads(lines[at]), leaf, rng):
            text = orjson.dumps(change(orjson.loads(lines[at])))
            yield Mutation(
                f"{name}:{field}",
                f"{how} in line {at + 1} of {len(lines)}",
                lambda run, at=at, text=text: put(run, [*lines[:at], text, *lines[at + 1 :]]),
            )
        values = {n: _get(orjson.loads(lines[n]), leaf) for n in holders}
        pair = next(((a, b) for a in holders for b in holders if a < b and values[a] != values[b]), None)
        if pair is not None:
            yield Mutation(
                f"{name}:{field}", f"swapped in lines {pair[0] + 1}, {pair[1] + 1}", _swap(name, leaf, lines, *pair)
            )


def _swap(name: str, leaf: tuple[Any, ...], lines: Sequence[bytes], a: int, b: int) -> Change:
    one, two = orjson.loads(lines[a]), orjson.loads(lines[b])
    first, second = _get(one, leaf), _get(two, leaf)
    found = [*lines]
    found[a], found[b] = orjson.dumps(_set(one, leaf, second)), orjson.dumps(_set(two, leaf, first))
    return lambda run: _put(run / name, b"".join(line + b"\n" for line in found))


def _of_database(path: Path, rng: random.Random) -> Iterator[Mutation]:
    connection = sqlite3.connect(path)
    tables = [n for (n,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    columns = {table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] for table in tables}
    rows = {table: connection.execute(f"SELECT rowid, * FROM {table}").fetchall() for table in tables}
    connection.close()

    def made(what: str, how: str, *statements: tuple[str, Sequence[Any]]) -> Mutation:
        return Mutation(f"{futures.DATABASE}:{what}", how, lambda run: _execute(run / futures.DATABASE, statements))

    for table in tables:
        yield made(f"{table}.", "table removed", (f"DROP TABLE {table}", ()))
        if not rows[table]:
            continue
        for row in (rows[table][0], rows[table][-1]):
            yield made(f"{table}.", f"row {row[0]} removed", (f"DELETE FROM {table} WHERE rowid = ?", row[:1]))
        key, *rest = row = rng.choice(rows[table])[1:]
        more = [
            f"{key}x" if isinstance(key, str) else key + 1000,
            *(f"{v}x" if c in _UNIQUE else v for c, v in zip(columns[table][1:], rest, strict=True)),
        ]
        yield made(f"{table}.", "row added", (f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", more))
        for n, column in enumerate(columns[table], start=1):
            at, *_ = row = rng.choice(rows[table])
            value = row[n] + b" " if isinstance(row[n], bytes) else other(row[n], rng)
            set_one = f"UPDATE OR REPLACE {table} SET {column} = ? WHERE rowid = ?"
            yield made(f"{table}.{column}", f"changed in row {at}", (set_one, (value, at)))
            if row[n] is not None and not (n == 1 or column in _UNIQUE):
                yield made(
                    f"{table}.{column}",
                    f"emptied in row {at}",
                    (set_one, (type(row[n])(), at)),
                )
            twin = next((one for one in rows[table] if one[n] != row[n]), None)
            if twin is not None and n > 1 and column not in _UNIQUE:
                yield made(
                    f"{table}.{column}",
                    f"swapped in rows {at}, {twin[0]}",
                    (set_one, (twin[n], at)),
                    (set_one, (row[n], twin[0])),
                )


_UNIQUE = ("owner", "seq", "future")


def _execute(path: Path, statements: Sequence[tuple[str, Sequence[Any]]]) -> None:
    connection = sqlite3.connect(path)
    for statement, values in statements:
        connection.execute(statement, values)
    connection.commit()
    connection.close()


def _changes(tree: Any, leaf: tuple[Any, ...], rng: random.Random) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    new = _another(_get(tree, leaf), rng)
    yield "changed", lambda one: _set(one, leaf, new)
    yield "removed", lambda one: _without(one, leaf)


def _another(value: Any, rng: random.Random) -> Any:
    """Another value that may be right: a share, a version, a digest of the same form."""
    if type(value) is float and 0 <= value <= 1:
        return round((value + rng.uniform(0.1, 0.8)) % 1.0, 3)
    if isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef"):
        return f"{int(value, 16) ^ 1:064x}"
    return other(value, rng)


def _leaves(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the leaves; of a list, those of its first and last element."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(one, (*before, key))
    elif isinstance(value, list) and value:
        for n in sorted({0, len(value) - 1}):
            yield from _leaves(value[n], (*before, n))
    else:
        yield before


def _named(leaf: tuple[Any, ...]) -> str:
    return ".".join(str(one) for one in leaf)


def _get(tree: Any, leaf: tuple[Any, ...]) -> Any:
    for one in leaf:
        tree = tree[one]
    return tree


def _set(tree: Any, leaf: tuple[Any, ...], value: Any) -> Any:
    if not leaf:
        return value
    _get(tree, leaf[:-1])[leaf[-1]] = value
    return tree


def _without(tree: Any, leaf: tuple[Any, ...]) -> Any:
    if not leaf:
        return None
    _get(tree, leaf[:-1]).pop(leaf[-1])
    return tree


def _put(path: Path, text: bytes) -> None:
    """The file may have a second name: another one takes its place."""
    path.unlink()
    path.write_bytes(text)


def _swapped(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    _put(one, second)
    _put(two, first)


def _flipped(text: bytes, at: float) -> bytes:
    n = int(len(text) * at)
    return text[:n] + bytes([text[n] ^ 1]) + text[n + 1 :]


def _yaml(tree: Any) -> bytes:
    return yaml.safe_dump(tree).encode()


# What the readers say.


def outputs(folder: Path) -> tuple[bool, Any]:
    """Return True if the proof of a folder finds a violation, and what proof and report say. Raises VolleyError."""
    if (folder / futures.DATABASE).exists():
        found = [*futures.problems(folder)]
        return bool(found), _rows(folder / futures.DATABASE)
    run = RunFolder(folder)
    proof = command.verify(run)
    if proof["violations"]:
        return True, None
    return False, ({key: one for key, one in proof.items() if key != "redis"}, report.read(run)[0])


def _rows(path: Path) -> Any:
    """All rows: a server that starts with the folder believes them."""
    connection = sqlite3.connect(path)
    tables = [n for (n,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    found = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
    connection.close()
    return found


def outcome(valid: Path, change: Change, said: Any) -> Outcome:
    """Try a change in a copy of the folder; `said` is what the readers said before."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(valid, Path(place) / valid.name))
        change(folder)
        try:
            named, now = outputs(folder)
        except (VolleyError, sqlite3.Error):
            return "named"
    return "named" if named else "without effect" if now == said else "believed"


def chosen(found: Sequence[Mutation], most: int, rng: random.Random) -> list[Mutation]:
    """At most so many of each entry."""
    of = defaultdict[str, list[Mutation]](list)
    for one in found:
        entry = entry_of(one.what)
        of[one.what if entry is None else entry.what].append(one)
    return [one for some in of.values() for one in (some if len(some) <= most else rng.sample(some, most))]


type Tried = Mapping[Mutation, Outcome]


def tried(folders: Sequence[Path], seed: int, most: int) -> Tried:
    """Outcome of each mutation."""
    found = dict[Mutation, Outcome]()
    for folder in folders:
        rng = random.Random(f"{seed} {folder.name}")
        named, said = outputs(folder)
        assert not named, f"{folder} is not proven"
        for one in chosen([*mutations(folder, rng)], most, rng):
            found[one] = outcome(folder, one.change, said)
    return found


def main(argv: Sequence[str]) -> int:
    from tests.support import believed_folders

    seed, most = (int(argv[0]) if argv else 0), (int(argv[1]) if len(argv) > 1 else sys.maxsize)
    with tempfile.TemporaryDirectory() as place:
        found = tried(believed_folders.make(Path(place)), seed, most)
    of = defaultdict[str, Counter[str]](Counter)
    for one, result in found.items():
        entry = entry_of(one.what)
        of["NOT IN THE LIST" if entry is None else entry.what][result] += 1
        if result == "believed" and (entry is None or entry.against is not None):
            print("BELIEVED", one.what, "|", one.how)
    print("| file and field | held against | tried | named | without effect | believed |")
    for what, counts in of.items():
        entry = next((one for one in BELIEVED if one.what == what), None)
        against = "" if entry is None else entry.against or f"not checked: {entry.sentence}"
        numbers = (counts.total(), *(counts[one] for one in ("named", "without effect", "believed")))
        print("|", " | ".join(map(str, (what, against, *numbers))), "|")
    total = Counter(found.values())
    print(f"{len(BELIEVED)} entries, {sum(one.against is not None for one in BELIEVED)} held; {total}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
