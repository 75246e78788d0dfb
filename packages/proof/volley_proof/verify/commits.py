"""Verify the commit records.

Each is whole, matches its name and has its groups; there is one per step since the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from shared.errors import VolleyError
from shared.run import archive, checkpoint_files, commits
from shared.run.commits import CommitRecord
from shared.run.folder import RunFolder
from shared.run.lineage import epoch_of, in_lineage, surviving
from shared.run.state import TrainerState
from shared.types import WeightVersion
from volley_proof.verify.checkpoints import RetainedCheckpoint
from volley_proof.verify.violation import Violation, ViolationKind

_MOST_MISSING = 100


def retained(folder: RunFolder, run: str) -> tuple[list[CommitRecord], list[Violation]]:
    """Read intact records, oldest first, and violations of the others, without records that a later trainer undid.

    If a running trainer removes a record meanwhile, it and all earlier ones are skipped: it removes the oldest first.
    """
    found, violations = list[CommitRecord](), list[Violation]()
    there = commits.versions(folder.archive)
    alive = set(surviving(sorted({*there, *checkpoint_files.versions(folder.checkpoints)})))
    for version in there:
        if version not in alive:
            continue
        path = commits.path_of(folder.archive, version)
        try:
            record = commits.read(folder.archive, version)
        except VolleyError as error:
            if path.exists():
                violations.append(_of(version, error.detail, path.relative_to(folder.path).as_posix()))
            else:
                found.clear()
            continue
        if record.run == run:
            found.append(record)
        else:
            violations.append(_of(version, f"it is of run {record.run[:100]}", path.name))
    return found, violations


def check(
    records: Sequence[CommitRecord], found: Sequence[RetainedCheckpoint], folder: RunFolder, head: TrainerState
) -> Iterator[Violation]:
    """Compare records with checkpoints, archive and each other, along the newest one's lineage."""
    mine: Mapping[WeightVersion, CommitRecord] = {r.version: r for r in records if in_lineage(r.version, head.lineage)}
    for one in found:
        record = mine.get(one.version)
        if record is not None and record.state != one.state:
            yield _of(one.version, f"its state differs from that of checkpoint {one.version}")
    if not mine:
        if found and _had_one(found[-1]) and not folder.bucket.exists():
            yield _of(found[-1].version, "no step has a record, although the trainer made one before this checkpoint")
        return
    archived = set(archive.versions(folder.archive))
    first = min(version.step for version in mine)
    last = min(head.step, first + len(mine) + len(archived) + _MOST_MISSING)  # a record may claim any step
    n_missing, beyond = 0, head.step - last
    for step in range(first + 1, last + 1):
        version = WeightVersion(epoch_of(step, head.lineage) or 0, step)
        if version in mine and version in archived:
            continue
        n_missing += 1
        if n_missing <= _MOST_MISSING:
            what = "a record, but no groups" if version in mine else "no record, although an earlier step has one"
            yield _of(version, f"it has {what}")
    if more := max(0, n_missing - _MOST_MISSING) + beyond:
        yield Violation(ViolationKind.COMMIT, f"and {more} more steps without a record", n=more)


def absent(records: Sequence[CommitRecord], found: Sequence[RetainedCheckpoint], folder: RunFolder) -> list[str]:
    """Return checks that are skipped for a folder restored from a bucket, which has no commit records."""
    if records or not found or not _had_one(found[-1]) or not folder.bucket.exists():
        return []
    return [f"commit records: there are none, and {folder.bucket.name} says that the folder comes from a bucket"]


def _had_one(newest: RetainedCheckpoint) -> bool:
    """Return True if the trainer of the newest checkpoint had made a record of an earlier step."""
    state = newest.state
    return bool(state.step) and epoch_of(state.step, state.lineage) == state.epoch


def missing_steps(
    records: Sequence[CommitRecord], undone: Sequence[Mapping[str, Any]], folder: RunFolder
) -> frozenset[WeightVersion]:
    """Return steps that the ledger records as trained but whose commit records are missing, newer than anything
    durable.

    A step's record is written before its ledger lines. Read `undone` before calling this. Empty for a run without
    records.
    """
    durable = commits.committed(folder)
    if not records or not durable:
        return frozenset()
    made = {WeightVersion(line["epoch"], line["step"]) for line in undone}
    return frozenset(version for version in made if version > durable[-1])


def as_violations(missing: Collection[WeightVersion]) -> Iterator[Violation]:
    """Turn the steps into violations."""
    for version in sorted(missing)[:_MOST_MISSING]:
        yield _of(version, "its tickets were trained, but its record is gone; the next start undoes it")


def _of(version: WeightVersion, detail: str, file: str | None = None) -> Violation:
    return Violation(ViolationKind.COMMIT, f"{version}: {detail}", step=version.step, file=file)
