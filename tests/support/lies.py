"""A seeded adversary: lies about a run that change several of its files, and re-make the digests they can reach.

A lie changes what the files say; `Remake` then makes all that follows from them again with the project's own functions,
but for the parts it is told to leave. With every part re-made the folder is one that an honest run could have left, and
nothing in it contradicts the lie: docs/security.md says so.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import blake3
import numpy as np
import orjson
import yaml

from shared import config
from shared.run import archive, checkpoint_files, checksums, commits, protected_files
from shared.run import state as states
from shared.run.archive import Archive
from shared.run.chain import Chain
from shared.run.commits import CommitRecord
from shared.run.folder import RunFolder
from shared.run.lineage import in_lineage
from shared.run.mixture import MixtureChange
from shared.run.state import TrainerState
from shared.types import Group, WeightVersion
from tests.support.small_run import RUN, Incarnation, write_config
from volley.runs.record import claimed, mark_finished

type Part = Literal["digests", "lines", "beginnings", "records", "states", "saved", "described"]
PARTS: tuple[Part, ...] = ("digests", "lines", "beginnings", "records", "states", "saved", "described")
type Lie = Callable[[RunFolder, random.Random], object]
NEWEST = WeightVersion(2, 5)


def make(folder: Path, prepare: Callable[[RunFolder], object] = lambda run: None) -> Path:
    """A run with evaluations and samples: two incarnations, five steps, a failed and a stale ticket.

    `prepare` adds files before the first incarnation.
    """
    write_config(folder)
    run = RunFolder(folder)
    prepare(run)

    async def first(trainer: Incarnation) -> None:
        _evaluated(run, WeightVersion(1, 0), 0.25)
        trainer.feed(2, 1, 4, version=WeightVersion(1, 0))
        trainer.queue.entries.append(Group(3, "toy", "train/3", (), failure="Timeout"))
        trainer.feed(6, version=WeightVersion(1, 0))
        await trainer.until(lambda status: status.durable_step == 2 and status.phase == "waiting")
        _evaluated(run, WeightVersion(1, 2), 0.5)

    async def second(trainer: Incarnation) -> None:
        trainer.feed(5, version=WeightVersion(1, 0))
        for step, tickets in ((3, (7, 8)), (4, (9, 10)), (5, (11, 12))):
            trainer.feed(*tickets, version=WeightVersion(2, step - 1))
            await trainer.until(lambda status, step=step: status.checkpoint_step == step)
            _evaluated(run, WeightVersion(2, step), 0.5 + step / 100)
        await trainer.until(lambda status: status.phase == "done")

    with claimed(config.load([folder / "config.yaml"])) as claim, ThreadPoolExecutor(1) as executor:
        asyncio.run(Incarnation(folder, executor).run(first))
        asyncio.run(Incarnation(folder, executor).run(second))
        mark_finished(claim.folder, claim.record)
    return folder


def _evaluated(run: RunFolder, version: WeightVersion, success: float) -> None:
    """As an orchestrator leaves it."""
    told = {"step": version.step, "version_min": str(version), "version_max": str(version), "n_tasks": 100}
    _append(run.evals, told | {"success": success, "reward_mean": success, "failed": 0})
    _append(run.samples, {"step": version.step, "task": "eval/0", "success": True, "text": "4"})


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("ab") as file:
        file.write(orjson.dumps(line) + b"\n")


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def rewrite(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in found))


class Remake:
    """Makes everything that follows from ledger, metrics, archive and parameters again, but for the `left` parts."""

    def __init__(self, run: RunFolder, left: frozenset[Part] = frozenset(), change: Mapping[str, Any] | None = None):
        self._run, self._left, self._change = run, left, dict(change or {})

    def __call__(self) -> None:
        run = self._run
        if "described" not in self._left:
            self._describe()
        versions = sorted({*checkpoint_files.versions(run.checkpoints), *commits.versions(run.archive)})
        head = commits.read(run.archive, versions[-1]).state
        for version in versions:
            record = self._record(version)
            raw = None if record is None else orjson.loads(orjson.dumps(record["state"]))
            path = run.checkpoints / str(version) / "state.json"
            there = orjson.loads(path.read_bytes()) if path.exists() else None
            told = self._told(raw if raw is not None else there, version, head)
            if record is not None and "records" not in self._left:
                state = TrainerState.from_mapping(raw | told)
                text = CommitRecord(record["run"], record["checksum"], state).to_json()
                commits.path_of(run.archive, version).write_bytes(text)
            if there is not None:
                self._checkpoint(path.parent, there, {} if "states" in self._left else told)

    def _describe(self) -> None:
        """Lines of metrics tell how the manifests describe their weights."""
        found = lines(self._run.metrics)
        for version in checkpoint_files.versions(self._run.checkpoints):
            folder = self._run.checkpoints / str(version)
            told, made = checkpoint_files.read_manifest(folder), checksums.made_as(states.read(folder)[0])
            described = checksums.description(told.model, told.tree, told.adapter, told.probe)
            for line in found:
                if line["version"] == str(made):
                    line["checksums"]["description"] = described
        rewrite(self._run.metrics, found)

    def _record(self, version: WeightVersion) -> dict[str, Any] | None:
        path = commits.path_of(self._run.archive, version)
        return orjson.loads(path.read_bytes()) if path.exists() else None

    def _told(self, raw: dict[str, Any], version: WeightVersion, head: TrainerState) -> dict[str, Any]:
        """What the state of the version has to say."""
        told = dict(self._change)
        if "lines" not in self._left and in_lineage(version, head.lineage):
            ledger, metrics = lines(self._run.ledger), {m["version"]: m for m in lines(self._run.metrics)}
            chain = Chain()
            for step in range(1, version.step + 1):
                mine = [x for x in ledger if x["disposition"] == "trained" and x["step"] == step]
                chain = chain.trained(mine, next(m for m in metrics.values() if m["step"] == step))
            ended = [x for x in ledger if x["disposition"] != "trained"]
            known = [x for x in ended if x["ticket"] <= raw["low"] or x["ticket"] in raw["done"]]
            told["chain"] = {"steps": chain.steps, "voids": chain.ended(known).voids}
            mine = {x["ticket"]: x for x in ledger if x["disposition"] == "trained"}
            told["recent"] = [mine.get(x["ticket"], x) for x in raw["recent"]]
            told["metrics"] = [metrics.get(m["version"], m) for m in raw["metrics"]]
        if "beginnings" not in self._left:
            told["files"] = {
                path.name: self._beginning(path, raw["files"]) for path in protected_files.files(self._run)
            }
            told["files"] = {name: value for name, value in told["files"].items() if value is not None}
        return told

    def _beginning(self, path: Path, known: Mapping[str, Any]) -> tuple[int, str] | None:
        """As many lines as before."""
        if path.name not in known and path.name != "mixture.jsonl":
            return None
        if not path.exists():
            return None
        size = min(known.get(path.name, (2**40,))[0], path.stat().st_size)
        return size, blake3.blake3(path.read_bytes()[:size]).hexdigest()

    def _checkpoint(self, folder: Path, there: dict[str, Any], told: Mapping[str, Any]) -> None:
        raw, before = there | told, (folder / checkpoint_files.MANIFEST).read_bytes()
        manifest = checkpoint_files.read_manifest(folder)
        if "digests" not in self._left:
            manifest = replace(manifest, files=checkpoint_files.digest_files(folder, "params"))
            raw["optimizer_files"] = [_plain(one) for one in checkpoint_files.digest_files(folder, "optimizer")]
            raw["seal"] = checkpoint_files.seal(manifest)
        text = orjson.dumps(raw, option=orjson.OPT_INDENT_2)
        if orjson.loads((folder / "state.json").read_bytes()) != orjson.loads(text):
            (folder / "state.json").write_bytes(text)
        manifest = replace(manifest, state=checkpoint_files.digest(folder / "state.json"))
        checkpoint_files.write_manifest(folder, manifest)
        if (folder / checkpoint_files.MANIFEST).read_bytes() != before and "saved" not in self._left:
            digest = checkpoint_files.digest(folder / checkpoint_files.MANIFEST)
            named = lines(self._run.saved)
            rewrite(self._run.saved, [x | {"manifest": digest} if x["version"] == folder.name else x for x in named])


def _plain(file: checkpoint_files.ManifestFile) -> dict[str, Any]:
    return {"name": file.name, "size": file.size, "blake3": file.blake3}


# What a person would want to tell.


def better_training(run: RunFolder, rng: random.Random) -> None:
    """Of one step."""
    found = lines(run.metrics)
    found[rng.randrange(len(found))]["reward_mean"] = rng.random() + 5
    rewrite(run.metrics, found)


def better_evaluations(run: RunFolder, rng: random.Random) -> None:
    """All but the first and, since nothing is made after it, the last."""
    found = lines(run.evals)
    found[rng.randrange(1, len(found) - 1)]["success"] = 0.99
    rewrite(run.evals, found)


def other_samples(run: RunFolder, rng: random.Random) -> None:
    found = lines(run.samples)
    found[rng.randrange(len(found) - 1)]["text"] = "5"
    rewrite(run.samples, found)


def hidden_failure(run: RunFolder, rng: random.Random) -> None:
    """A ticket that failed is said to have been too old."""
    found = lines(run.ledger)
    next(x for x in found if x["disposition"] == "failed").update(disposition="stale", reason=None)
    rewrite(run.ledger, found)


def _group(run: RunFolder, step: int, change: Callable[[Group], Group]) -> None:
    """The first group of a step of epoch 2, in the archive and in the ledger."""
    version = WeightVersion(2, step)
    groups = [Group.decode(payload) for payload in archive.read(run.archive, RUN, version)]
    groups[0] = change(groups[0])
    digest = Archive(run.archive, RUN).write(version, [one.encode() for one in groups])[0]
    found = lines(run.ledger)
    next(x for x in found if x["ticket"] == groups[0].ticket).update(digest=digest)
    rewrite(run.ledger, found)


def other_data(run: RunFolder, rng: random.Random) -> None:
    """Other rewards than were trained on."""

    def rewarded(one: Group) -> Group:
        return replace(one, trajectories=tuple(replace(t, reward=t.reward + 1) for t in one.trajectories))

    _group(run, rng.choice((3, 4, 5)), rewarded)


def foreign_environment(run: RunFolder, rng: random.Random) -> None:
    """One ticket was of another environment, and mixture.jsonl says so."""
    step = rng.choice((4, 5))
    _group(run, step, lambda one: replace(one, env="adder", trajectories=_of_adder(one)))
    ticket = 2 * step + 1
    changes = MixtureChange(ticket, {"adder": 1}), MixtureChange(ticket + 1, {"toy": 1})
    run.mixture.write_bytes(b"".join(one.encode() for one in changes))


def _of_adder(one: Group) -> tuple[Any, ...]:
    return tuple(replace(t, env="adder") for t in one.trajectories)


def foreign_weights(run: RunFolder, rng: random.Random) -> None:
    """Of one retained checkpoint."""
    folder = run.checkpoints / str(rng.choice(checkpoint_files.versions(run.checkpoints)))
    _other_number(folder / "params" / "w.npy", rng)


def emptied_optimizer(run: RunFolder, rng: random.Random) -> None:
    folder = run.checkpoints / str(rng.choice(checkpoint_files.versions(run.checkpoints)))
    _other_number(folder / "optimizer" / "optimizer.count.npy", rng)


def _other_number(path: Path, rng: random.Random) -> None:
    """The file is a link's target: a copy takes its place."""
    value = np.load(path)
    path.unlink()
    np.save(path, np.asarray(rng.random(), value.dtype))


DESCRIPTIONS: Mapping[str, Any] = {
    "model": {"rope_theta": 1e6},
    "probe": {"input_ids": [1, 2], "logprobs": [-1.0], "noise": None},
    "tree": [{"key": "w", "shape": [3, 2], "dtype": "float32"}],
}
"""How a manifest may describe its weights otherwise than a run of ours does."""


def describe(run: RunFolder, key: str, *versions: WeightVersion) -> None:
    """Otherwise, in the manifests of these versions, or of all."""
    for version in versions or checkpoint_files.versions(run.checkpoints):
        path = run.checkpoints / str(version) / checkpoint_files.MANIFEST
        told = orjson.loads(path.read_bytes()) | {key: DESCRIPTIONS[key]}
        path.write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2))


def other_model(run: RunFolder, rng: random.Random) -> None:
    """Its config.json as the checkpoints describe it."""
    describe(run, "model")


def other_probe(run: RunFolder, rng: random.Random) -> None:
    describe(run, "probe")


def other_shapes(run: RunFolder, rng: random.Random) -> None:
    describe(run, "tree")


LIES: tuple[Lie, ...] = (
    better_training,
    better_evaluations,
    other_samples,
    hidden_failure,
    other_data,
    foreign_environment,
    foreign_weights,
    emptied_optimizer,
    other_model,
    other_probe,
    other_shapes,
)


def set_everywhere(run: RunFolder, key: str, value: Any) -> dict[str, Any]:
    """In config.yaml and run.json; returns what the states have to say."""
    tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    *path, last = key.split(".")
    node = tree
    for name in path:
        node = node.setdefault(name, {})
    node[last] = value
    run.config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    record = orjson.loads(run.record.read_bytes())
    record["config"][key] = value
    run.record.write_bytes(orjson.dumps(record))
    head = commits.read(run.archive, NEWEST).state
    epoch, flat = head.settings[0]
    return {"settings": [[epoch, {**flat, key: value}], *map(list, head.settings[1:])]}


SETTINGS: Mapping[str, Any] = {
    "trainer.optimizer_config.learning_rate": 0.125,
    "grpo_config.off_policy_steps": 3,
    "algorithm.beta": 0.5,
}
"""Each with another value than the run had."""


def lie_about_setting(run: RunFolder, key: str, left: frozenset[Part]) -> None:
    change = set_everywhere(run, key, SETTINGS[key])
    Remake(run, left, change)()


def partly(rng: random.Random, n: int) -> list[frozenset[Part]]:
    """So many choices of parts that are left as they were, at least one."""
    some = [frozenset(left) for k in range(1, len(PARTS) + 1) for left in combinations(PARTS, k)]
    return rng.sample(some, n)


# Fewer steps: the run as it was after step 4.

type Removal = Literal["ledger", "metrics", "handovers", "evals", "samples", "saved", "run.json"]
REMOVALS: tuple[Removal, ...] = ("ledger", "metrics", "handovers", "evals", "samples", "saved", "run.json")


def roll_back(run: RunFolder, left: frozenset[Removal] = frozenset()) -> None:
    """Without the newest step, its checkpoint and its record; what tells of it in the files that are not `left` goes
    as well.
    """
    shutil.rmtree(run.checkpoints / str(NEWEST))
    commits.path_of(run.archive, NEWEST).unlink()
    archive.path_of(run.archive, NEWEST).unlink()
    by_name = {"ledger": run.ledger, "metrics": run.metrics, "handovers": run.handovers, "saved": run.saved}
    by_name |= {"evals": run.evals, "samples": run.samples}
    for name, path in by_name.items():
        if name not in left:
            rewrite(path, [line for line in lines(path) if line["step"] < NEWEST.step])
    if "run.json" not in left:
        record = orjson.loads(run.record.read_bytes())
        run.record.write_bytes(orjson.dumps(record | {"finished": False, "final": None}))
