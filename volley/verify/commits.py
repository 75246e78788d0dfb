"""The commit records: whole, what their names say, one for each step since the first, and none without its groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shared.errors import VolleyError
from shared.run import archive, checkpoint_files, commits
from shared.run import state as states
from shared.run.commits import CommitRecord
from shared.run.folder import RunFolder
from shared.run.state import TrainerState, epoch_of, in_lineage
from shared.types import WeightVersion
from volley.verify.checkpoints import RetainedCheckpoint
from volley.verify.violation import Violation, ViolationKind

_MOST_MISSING = 100


def retained(folder: RunFolder, run: str) -> tuple[list[CommitRecord], list[Violation]]:
    """The whole records, oldest first, and what is wrong with the others, but for those that a later trainer undid.

    One that a running trainer removes meanwhile is neither, nor are the earlier ones: it removes the oldest first.
    """
    found, violations = list[CommitRecord](), list[Violation]()
    there = commits.versions(folder.archive)
    alive = set(states.surviving(sorted({*there, *checkpoint_files.versions(folder.checkpoints)})))
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
    """Records against checkpoints, archive and each other, along the lineage of the newest."""
    mine: Mapping[WeightVersion, CommitRecord] = {r.version: r for r in records if in_lineage(r.version, head.lineage)}
    for one in found:
        record = mine.get(one.version)
        if record is not None and record.state != replace(one.state, schema=record.state.schema):
            yield _of(one.version, f"it tells another state than checkpoint {one.version}")
    if not mine:
        if found and _has_lost_all(found[-1], folder):
            yield _of(found[-1].version, "no step has a record, though its trainer made it after one")
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
            what = "a record, but no groups" if version in mine else "no record, though an earlier step has one"
            yield _of(version, f"it has {what}")
    if more := max(0, n_missing - _MOST_MISSING) + beyond:
        yield Violation(ViolationKind.COMMIT, f"and {more} more steps without a record", n=more)


def _has_lost_all(newest: RetainedCheckpoint, folder: RunFolder) -> bool:
    """Tell if the trainer that made the newest checkpoint had made its record before: not where an epoch begins with
    the step of another trainer, perhaps an older version of Volley, nor where the folder is as the bucket filled it.
    """
    state = newest.state
    is_own = bool(state.step) and epoch_of(state.step, state.lineage) == state.epoch
    return is_own and state.files is not None and not folder.bucket.exists()


def gone(
    records: Sequence[CommitRecord], undone: Sequence[Mapping[str, Any]], folder: RunFolder
) -> frozenset[WeightVersion]:
    """Steps whose tickets the ledger tells of as trained, and that nothing durable is as new as: their records were
    there before those lines. `undone` was read before this is called; a run without records had none.
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
