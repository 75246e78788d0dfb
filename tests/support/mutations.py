"""Manipulations of a valid run's folder, made by a seed: fields, lines, files, types and sizes of everything that makes
a claim.

A manipulation changes what a record means: blanks and the order of keys in JSON mean nothing. Those that are `told`
also re-make the digest that names the file, as a liar would. What is not touched, because nothing else in the folder
could contradict it:
- of run.json: `digest`, `versions`, `created`, `elapsed_s`, `cwd` (remarks on the machine), and `finished` set back to
  false (the supervisor may have been killed right before it wrote it);
- of config.yaml: addresses and limits (shared.run.pinned.IRRELEVANT);
- of a re-sealed newest state.json: a higher `issued` (a ticket still under way leaves no trace);
- an empty line in ledger.jsonl: what a mend has made of a torn one;
- the last line of refused.jsonl, removed, where nothing of its epoch came after it: a crash between file and line
  leaves the same;
- the last line of ledger.jsonl or metrics.jsonl, removed: the newest checkpoint carries it, and a crash leaves the
  same.

`python -m tests.support.mutations VALID_RUN [SEED [MOST_OF_A_KIND]]` verifies each and prints what was named, as a
table.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import yaml
import zstandard

from shared import codec
from shared.config import load
from shared.errors import VolleyError
from shared.run import archive, checkpoint_files, pinned
from shared.run.archive import Archive
from shared.run.folder import RunFolder
from shared.types import Group, WeightVersion
from volley_proof.verify import command

_TRACEBACKS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ExceptionGroup,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
MOST_BYTES, MOST_S = 10**9, 20.0
_RUN_KEYS = ("seed", "config", "finished", "final", "amendments")
_FILES = ("ledger.jsonl", "metrics.jsonl", "run.json", "config.yaml")

type Change = Callable[[Path], object]
type Mutation = tuple[str, str, Change]
"""Kind, what exactly, and what makes it."""


def mutations(valid: Path, seed: int = 0) -> list[Mutation]:
    """All of them, for copies of the folder `valid`."""
    rng = random.Random(seed)
    return [
        *_lines(valid, rng),
        *_state(valid, rng),
        *_manifest(valid, rng),
        *_configs(valid, rng),
        *_archives(valid, rng),
        *_files(valid, rng),
        *_sizes(valid),
    ]


def other(value: Any, rng: random.Random) -> Any:
    """A different value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.choice((1, 2, 5))
    if isinstance(value, str):
        return rng.choice((value + "x", value[:-1] + ("1" if value[-1:] != "1" else "2")))
    if isinstance(value, list):
        return [*value, value[-1]] if value else [0]
    if isinstance(value, dict):
        return value | {"x": 1}
    return 1


def odd(value: Any, rng: random.Random) -> Any:
    """A value of another type."""
    return rng.choice([x for x in (None, "x", -1, 2**62, 1e300, [], {}, [[]], True) if type(x) is not type(value)])


def _lines(valid: Path, rng: random.Random) -> Iterator[Mutation]:
    for name in ("ledger.jsonl", "metrics.jsonl"):
        n = len((valid / name).read_bytes().splitlines())
        keys = list(_json_lines(valid / name)[0])
        for key in keys:
            for make in (other, odd):
                at = rng.randrange(n)
                new = make(_json_lines(valid / name)[at].get(key), rng)
                yield (
                    f"{name}: field, {make.__name__}",
                    f"line {at + 1}, {key}",
                    _edit_lines(name, lambda lines, at=at, key=key, new=new: lines[at].__setitem__(key, new)),
                )
            at = rng.randrange(n - 1)
            yield (
                f"{name}: field removed",
                f"line {at + 1}, {key}",
                _edit_lines(
                    name,
                    lambda lines, at=at, key=key: (
                        lines[at].pop(key, None) if lines[at].get(key) is not None else lines.pop(at)
                    ),
                ),
            )
        for at in range(n - 1):
            yield f"{name}: line removed", f"line {at + 1}", _edit_lines(name, lambda lines, at=at: lines.pop(at))
        empty = [b"\n"] if name == "metrics.jsonl" else []
        for junk in (b"{}\n", b"[]\n", b"null\n", b"\xff\n", *empty, b"{\n", b'{"a":' * 2000 + b"\n"):
            yield (
                f"{name}: junk line",
                repr(junk[:10]),
                lambda run, name=name, junk=junk: (run / name).write_bytes((run / name).read_bytes() + junk),
            )
    yield "metrics.jsonl: line twice", "the third", _edit_lines("metrics.jsonl", lambda lines: lines.append(lines[2]))
    yield (
        "ledger.jsonl: order of a step",
        "the last two",
        _edit_lines("ledger.jsonl", lambda lines: lines.__setitem__(slice(-2, None), lines[:-3:-1])),
    )
    void = _json_lines(valid / "ledger.jsonl")[-1] | {
        "disposition": "failed",
        "versions": None,
        "reason": "x",
        "digest": None,
    }
    for ticket, epoch, step in (
        (99, 2, 3),
        (10**15, 2, 3),
        (13, 0, 3),
        (13, 3, 5),
        (13, 2, 6),
        (0, 2, 5),
        (13, 2, 5),
        (5, 99, 5),
    ):
        line = void | {"ticket": ticket, "epoch": epoch, "step": step, "version": str(WeightVersion(epoch, step))}
        yield (
            "ledger.jsonl: void that nobody wrote",
            f"ticket {ticket}, e{epoch}-s{step}",
            _edit_lines("ledger.jsonl", lambda lines, line=line: lines.append(line)),
        )


def _state(valid: Path, rng: random.Random) -> Iterator[Mutation]:
    """Of the newest checkpoint and of the one before; TOLD where the manifest is re-made."""
    for folder in sorted((valid / "checkpoints").iterdir())[-2:]:
        raw = orjson.loads((folder / "state.json").read_bytes())
        for key, value in raw.items():
            yield (
                "state.json: field",
                f"{folder.name}, {key}",
                _edit_state(folder.name, {key: other(value, rng)}, told=False),
            )
            yield (
                "state.json: type, told",
                f"{folder.name}, {key}",
                _edit_state(folder.name, {key: odd(value, rng)}, told=True),
            )
        for key in ("epoch", "step", "low", "void", "seed", "lineage", "chain", "recent", "metrics", "settings"):
            new = {
                "chain": raw["chain"] | {"steps": "0" * 64},
                "recent": raw["recent"][1:] + raw["recent"][:1],
                "metrics": [line | {"loss": 9.0} for line in raw["metrics"]],
            }
            new["recent"] = [line | {"digest": "0" * 64} for line in raw["recent"]]
            new["settings"] = [[raw["settings"][0][0], raw["settings"][0][1] | {"algorithm.beta": 7.0}]]
            yield (
                "state.json: value, told",
                f"{folder.name}, {key}",
                _edit_state(folder.name, {key: new[key] if key in new else _more(raw[key])}, told=True),
            )
    head = sorted((valid / "checkpoints").iterdir())[-1].name
    yield "state.json: value, told", f"{head}, phase", _edit_state(head, {"phase": "rl"}, told=True)
    for key in ("step", "low", "void", "epoch"):
        yield "state.json: huge number, told", key, _edit_state(head, {key: 2**52}, told=True)


def _more(value: Any) -> Any:
    return [*value[:-1], [value[-1][0], value[-1][1] + 1]] if isinstance(value, list) else value + 1


def _manifest(valid: Path, rng: random.Random) -> Iterator[Mutation]:
    head = sorted((valid / "checkpoints").iterdir())[-1].name
    raw = orjson.loads((valid / "checkpoints" / head / "manifest.json").read_bytes())
    for key, value in raw.items():
        for make in (other, odd):
            new = make(value, rng)
            if new != value:
                yield (
                    f"manifest.json: field, {make.__name__}",
                    key,
                    _edit_json(f"checkpoints/{head}/manifest.json", {key: new}),
                )
    for key, new in {
        "tree": [],
        "files": [],
        "kind": "delta",
        "path": "../..",
        "state": None,
        "base_version": "e000009-s000009",
    }.items():
        yield "manifest.json: hostile", key, _edit_json(f"checkpoints/{head}/manifest.json", {key: new})


def _configs(valid: Path, rng: random.Random) -> Iterator[Mutation]:
    flat = pinned.relevant(load([valid / "config.yaml"]).config)
    chosen = (
        "grpo_config.off_policy_steps",
        "grpo_config.num_generations",
        "trainer.groups_per_step",
        "run.seed",
        "trainer.max_steps",
        "trainer.optimizer_config.learning_rate",
        "algorithm.beta",
    )
    for key in chosen:
        new = 0.5 if isinstance(flat[key], float) or "beta" in key else int(flat[key] or 0) + 1
        yield "config.yaml: value", key, lambda run, key=key, new=new: _set_yaml(run / "config.yaml", key, new)
        yield "run.json: configuration", key, _edit_json("run.json", {"config": flat | {key: new}})
    record = orjson.loads((valid / "run.json").read_bytes())
    for key in _RUN_KEYS:
        yield "run.json: type", key, _edit_json("run.json", {key: odd(record[key], rng) if key != "final" else 7})
    yield "run.json: value", "seed", _edit_json("run.json", {"seed": 5})
    origin = {"run": "other", "folder": "/nowhere", "version": "e000009-s000009", "manifest": "0" * 64}
    yield "run.json: value", "origin", _edit_json("run.json", {"origin": origin})
    yield "run.json: value", "final", _edit_json("run.json", {"final": "e000002-s000004"})
    yield (
        "run.json: value",
        "amendments",
        _edit_json(
            "run.json", {"amendments": [{"time": 0.0, "from_step": 2, "changes": {"algorithm.beta": [0.0, 1.0]}}]}
        ),
    )


def _archives(valid: Path, rng: random.Random) -> Iterator[Mutation]:
    for epoch, step in ((1, 1), (2, 3), (2, 4), (2, 5)):
        version = WeightVersion(epoch, step)
        for name, change in _GROUPS.items():
            for told in (False, True):
                yield (
                    f"archive: {name}{', told' if told else ''}",
                    str(version),
                    lambda run, v=version, c=change, t=told: _edit_archive(run, v, c, t),
                )
        path = archive.path_of(Path("archive"), version)
        for n in (1, 2, 4, 30):
            yield (
                "archive: cut",
                f"{version}, {n} bytes",
                lambda run, path=path, n=n: os.truncate(run / path, (run / path).stat().st_size - n),
            )
        at = rng.random()
        yield "archive: byte flipped", str(version), lambda run, path=path, at=at: _flip(run / path, at)
        yield (
            "archive: bytes added",
            str(version),
            lambda run, path=path: (run / path).write_bytes((run / path).read_bytes() + b"x"),
        )


def _reward(one: Any) -> Any:
    return replace(one, reward=one.reward + 5)


def _tokens(one: Any) -> Any:
    ids = one.token_ids.copy()
    ids[4] += 1
    return replace(one, token_ids=ids)


def _logprobs(one: Any) -> Any:
    return replace(one, logprobs=one.logprobs * 2)


_GROUPS: dict[str, Callable[[list[Group]], object]] = {
    "reward": lambda groups: groups.__setitem__(
        0, replace(groups[0], trajectories=tuple(map(_reward, groups[0].trajectories)))
    ),
    "token": lambda groups: groups.__setitem__(
        0, replace(groups[0], trajectories=tuple(map(_tokens, groups[0].trajectories)))
    ),
    "log-probabilities": lambda groups: groups.__setitem__(
        1, replace(groups[1], trajectories=tuple(map(_logprobs, groups[1].trajectories)))
    ),
    "task": lambda groups: groups.__setitem__(1, replace(groups[1], task="train/other")),
    "an episode less": lambda groups: groups.__setitem__(
        0, replace(groups[0], trajectories=groups[0].trajectories[1:])
    ),
    "order": lambda groups: groups.reverse(),
    "a group less": lambda groups: groups.pop(),
}


def _files(valid: Path, rng: random.Random) -> Iterator[Mutation]:
    """Missing, empty, half, another, or no files at all."""
    inside = sorted(
        str(p.relative_to(valid))
        for p in valid.rglob("*")
        if p.is_file() and p.relative_to(valid).parts[0] in ("archive", "checkpoints")
    )
    steps = [name for name in inside if name.startswith("archive") and "e000001/s000003" not in name]
    retained = [name for name in inside if name.startswith("checkpoints") and not name.endswith("manifest.json")]
    for name in (*_FILES, *rng.sample(steps, 3), *rng.sample(retained, 6)):
        for what, put in _PUT.items():
            yield f"file: {what}", name, lambda run, name=name, put=put: put(run / name)
    for name in rng.sample(retained, 3):
        yield "file: byte flipped", name, lambda run, name=name: _flip(run / name, 0.5)
    head = sorted((valid / "checkpoints").iterdir())[-1].name
    yield "folder: removed", f"checkpoints/{head}", lambda run: shutil.rmtree(run / "checkpoints" / head)
    yield "folder: removed", "checkpoints", lambda run: shutil.rmtree(run / "checkpoints")
    yield "folder: removed", "archive", lambda run: shutil.rmtree(run / "archive")
    for place in ("", "params", "optimizer"):
        yield (
            "file: FIFO added",
            f"{head}/{place}",
            lambda run, place=place: os.mkfifo(run / "checkpoints" / head / place / "x"),
        )
        yield (
            "file: added",
            f"{head}/{place}",
            lambda run, place=place: (run / "checkpoints" / head / place / "y").write_bytes(b"1"),
        )


def _replaced(make: Callable[[Path], object]) -> Change:
    def put(path: Path) -> None:
        path.unlink()
        make(path)

    return put


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, chdir(path.parent):
        one.bind(path.name)


_PUT: dict[str, Change] = {
    "removed": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "halved": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2].rpartition(b"\n")[0]),
    "FIFO": _replaced(os.mkfifo),
    "folder": _replaced(Path.mkdir),
    "socket": _replaced(_socket),
    "loop of links": _replaced(lambda path: path.symlink_to(path)),
    "device": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 4),
}


def _sizes(valid: Path) -> Iterator[Mutation]:
    head, line = (
        sorted((valid / "checkpoints").iterdir())[-1].name,
        (valid / "ledger.jsonl").read_bytes().splitlines(keepends=True)[0],
    )
    path = archive.path_of(Path("archive"), WeightVersion(2, 4))
    header = codec.pack(
        {"schema": 1, "run": valid.name, "version": "e000002-s000004", "n": 2, "digests": ["0" * 64] * 2}
    )
    compress = zstandard.ZstdCompressor(19).compress
    bombs = {
        "empty lists": compress(header) + compress(b"\xdd\x0f\xff\xff\xff" + b"\x90" * 2**27),
        "zeros": compress(header) + compress(b"\xc6\x10\x00\x00\x00" + bytes(2**28)),
        "a header of lists": compress(b"\xdd\x0f\xff\xff\xff" + b"\x90" * 2**27),
        "a million frames": compress(codec.pack(codec.unpack(header) | {"n": 10**9, "digests": None}))
        + compress(b"\xc4\x00") * 10**6,
    }
    for name, data in bombs.items():
        yield "size: archive that unpacks", name, lambda run, data=data: (run / path).write_bytes(data)
    yield "size: ledger of a million lines", "one void", lambda run: (run / "ledger.jsonl").write_bytes(_many(line))
    yield "size: ledger of a million bad lines", "{}", lambda run: (run / "ledger.jsonl").write_bytes(b"{}\n" * 10**6)
    yield (
        "size: one line of 300 MB",
        "ledger.jsonl",
        lambda run: (run / "ledger.jsonl").write_bytes(b'"' * (3 * 10**8) + b"\n"),
    )
    yield "size: metrics of a million lines", "{}", lambda run: (run / "metrics.jsonl").write_bytes(b"{}\n" * 10**6)
    yield (
        "size: state of 60 MB",
        "lists",
        lambda run: (run / "checkpoints" / head / "state.json").write_bytes(b"[" + b"[]," * (2 * 10**7) + b"[]]"),
    )
    yield (
        "size: state of 200 MB",
        "zeros",
        lambda run: os.truncate(run / "checkpoints" / head / "state.json", 2 * 10**8),
    )
    yield (
        "size: manifest of 15 MB",
        "lists",
        lambda run: (run / "checkpoints" / head / "manifest.json").write_bytes(b"[" + b"[]," * (5 * 10**6) + b"[]]"),
    )
    yield "size: run.json", "of 1 GB", lambda run: os.truncate(run / "run.json", 10**9)
    yield (
        "size: config.yaml",
        "of aliases",
        lambda run: (run / "config.yaml").write_text(_alias_bomb(), encoding="utf-8"),
    )
    yield (
        "size: config.yaml",
        "deep",
        lambda run: (run / "config.yaml").write_text("run: " + "[" * 5000, encoding="utf-8"),
    )


def _many(line: bytes) -> bytes:
    one = orjson.loads(line) | {"disposition": "failed", "versions": None, "digest": None}
    return b"".join(orjson.dumps(one | {"ticket": ticket}) + b"\n" for ticket in range(100, 10**6))


def _alias_bomb() -> str:
    names = "abcdefghi"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{now}: &{now} [{', '.join([f'*{before}'] * 9)}]" for before, now in pairwise(names)]
    return "\n".join(lines)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def _edit_lines(name: str, change: Callable[[list[dict[str, Any]]], object]) -> Change:
    def edit(run: Path) -> None:
        lines = _json_lines(run / name)
        change(lines)
        (run / name).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))

    return edit


def _edit_json(name: str, changes: dict[str, Any]) -> Change:
    return lambda run: (run / name).write_bytes(orjson.dumps(orjson.loads((run / name).read_bytes()) | changes))


def _edit_state(version: str, changes: dict[str, Any], *, told: bool) -> Change:
    def edit(run: Path) -> None:
        folder = run / "checkpoints" / version
        _edit_json("state.json", changes)(folder)
        if told:
            _edit_json("manifest.json", {"state": checkpoint_files.digest(folder / "state.json")})(folder)

    return edit


def _edit_archive(run: Path, version: WeightVersion, change: Callable[[list[Group]], object], told: bool) -> None:
    groups = [Group.decode(payload) for payload in archive.read(run / "archive", run.name, version)]
    change(groups)
    digests = Archive(run / "archive", run.name).write(version, [group.encode() for group in groups])
    if told:
        of = {group.ticket: digest for group, digest in zip(groups, digests, strict=True)}
        _edit_lines(
            "ledger.jsonl",
            lambda lines: [
                line.__setitem__("digest", of[line["ticket"]]) for line in lines if line.get("ticket") in of
            ],
        )(run)


def _set_yaml(path: Path, key: str, value: Any) -> None:
    tree = at = yaml.safe_load(path.read_text(encoding="utf-8"))
    *sections, last = key.split(".")
    for section in sections:
        at = at.setdefault(section, {})
    at[last] = value
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")


def _flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x41
    path.write_bytes(data)


def judged(valid: Path, change: Change, limit_s: float) -> str:
    """What `verify` says of a manipulated copy: its kinds of violation, the ConfigError that refuses it, or what went
    wrong.
    """
    with tempfile.TemporaryDirectory() as root:
        run = Path(root) / valid.name
        shutil.copytree(valid, run)
        change(run)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            result = command.verify(RunFolder(run))
        except VolleyError as error:
            return f"refused: {error.detail}"[:80]
        except _TRACEBACKS as error:
            return f"FAILED: {type(error).__name__}: {error}"[:300]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak > MOST_BYTES or len(orjson.dumps(result)) > MOST_BYTES // 1000:
        return f"FAILED: {peak // 10**6} MB"
    return "NOT NAMED" if result["ok"] else ", ".join(sorted({violation["kind"] for violation in result["violations"]}))


def _late(number: int, frame: object) -> None:
    raise TimeoutError("it was not done in time")


def main(argv: list[str]) -> int:
    """RUN_DIR [SEED [OF_A_KIND [LIMIT_S]]]: prints a line each; the exit code is 1 if one is not named, or costs too
    much.
    """
    limit_s = float(argv[3]) if len(argv) > 3 else MOST_S
    signal.signal(signal.SIGALRM, _late)
    valid, seed = Path(argv[0]), int(argv[1]) if len(argv) > 1 else 0
    made, of = list[Mutation](), Counter[str]()
    for one in mutations(valid, seed):
        of[one[0]] += 1
        if of[one[0]] <= (int(argv[2]) if len(argv) > 2 else sys.maxsize):
            made.append(one)
    verdicts = [(kind, what, judged(valid, change, limit_s)) for kind, what, change in made]
    bad = [row for row in verdicts if row[2].startswith(("FAILED", "NOT NAMED"))]
    kinds = sorted({kind for kind, _, _ in verdicts})
    print("| manipulation | made | named |", "| --- | --- | --- |", sep="\n")
    for kind in kinds:
        n, n_bad = (sum(row[0] == kind for row in rows) for rows in (verdicts, bad))
        print(f"| {kind} | {n} | {n - n_bad} |")
    for row in bad:
        print(*row, sep=" | ")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{len(verdicts)} manipulations of {len(kinds)} kinds, {len(verdicts) - len(bad)} named, peak {peak} MB")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
