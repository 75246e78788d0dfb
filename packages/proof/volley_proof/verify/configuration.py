"""Compare config.yaml, run.json and fork.json with the newest checkpoint (see shared.run.pinned)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from shared.errors import ConfigError, DecodeError
from shared.run import archive, pinned
from shared.run.folder import RunFolder
from shared.run.lineage import ForkPoint, in_lineage
from shared.run.state import TrainerState
from shared.schema import RunConfig
from shared.types import WeightVersion
from volley.runs.run_file import RunRecord, read_record
from volley_proof.verify.violation import Violation, ViolationKind
from volley_python.folder.forks import Fork

_MOST_NAMED = 20

type Amended = tuple[int, dict[str, list[object]]]
"""First step with the new values, and [was, now] by key."""


def check(folder: RunFolder, config: RunConfig, head: TrainerState, saved: WeightVersion) -> Iterator[Violation]:
    """Yield differences.

    A run that is about to continue with amended settings records them in run.json, and then in its next checkpoint.

    Args:
        saved: newest whole checkpoint of the lineage.
    """
    record = read_record(folder)
    if record is None and (folder.record.is_symlink() or folder.record.exists() or head.settings):
        yield _of(folder, "it is missing, or not a run's record")
    in_force = pinned.in_force(head.settings, head.epoch)
    if config.run.seed != head.seed:
        yield Violation(
            ViolationKind.CONFIG,
            f"run.seed is {config.run.seed}, {head.version} was made with {head.seed}",
            file=folder.config.name,
        )
    expected = in_force if record is None else record.config
    if expected:
        where = str(head.version) if record is None else folder.record.name
        yield from _differing(folder.config.name, pinned.changes(expected, pinned.relevant(config)), f"in {where}")
    if record is not None:
        if in_force:
            changed = [c for c in pinned.changes(in_force, record.config) if not _announced(c, record, head)]
            yield from _differing(folder.record.name, changed, f"in force at {head.version}")
        yield from _record(folder, record, head, saved)
    if (problem := _fork(folder, head)) is not None:
        yield Violation(ViolationKind.CONFIG, problem, file=folder.fork.name)


def _fork(folder: RunFolder, head: TrainerState) -> str | None:
    """Return how fork.json contradicts the newest state; a fork that has not begun has the state of the other run.

    A state of the fork itself holds the digest of the file (see shared.run.protected_files).
    """
    try:
        fork = Fork.read(folder)
    except ConfigError as error:
        return error.detail
    if fork is None:
        return f"it is missing, {head.version} was trained from the log of {head.forks[-1].run}" if head.forks else None
    *before, newest = fork.points
    has_begun = fork.points == head.forks
    if has_begun or (tuple(before) == head.forks and _is_copied(head, newest)):
        return None
    return f"its fork points are not those of {head.version}"


def _is_copied(head: TrainerState, point: ForkPoint) -> bool:
    return head.step == point.step and in_lineage(head.version, point.lineage)


def absent(folder: RunFolder, head: TrainerState) -> list[str]:
    """Files that no state covers, although the folder has them."""
    name = folder.fork.name
    if not folder.fork.exists() or name in head.files:
        return []
    return [f"{name}: {head.version} does not hold its digest; the fork has not begun"]


def _announced(change: pinned.Change, record: RunRecord, head: TrainerState) -> bool:
    """Return True if run.json announces a permitted change from the newest step on; never for a finished run."""
    if record.finished or not pinned.rule_of(change.key).may:
        return False
    return any(
        one.from_step == head.step and list(one.changes.get(change.key, ())) == [change.was, change.now]
        for one in record.amendments
    )


def _record(folder: RunFolder, record: RunRecord, head: TrainerState, saved: WeightVersion) -> Iterator[Violation]:
    if record.seed != head.seed:
        yield _of(folder, f"seed is {record.seed}, but {head.version} was made with {head.seed}")
    if record.origin != head.origin:
        yield _of(folder, f"origin is {record.origin}, but {head.version} has {head.origin}"[:300])
    if head.settings and (problem := _history(folder, record, head)) is not None:
        yield _of(folder, f"amendments differ from those of {head.version}: {problem}")
    if not record.finished:
        return
    if record.final is not None and not (_ended_as(record.final, head) and saved.step == head.step):
        yield _of(
            folder,
            f"the run is finished with {record.final}, the newest whole checkpoint is {saved}",
            ViolationKind.CHECKPOINT,
        )
    if head.phase != "done":
        yield _of(folder, f"the run is finished, but {head.version} is not its last step", ViolationKind.CHECKPOINT)


def _ended_as(final: str, head: TrainerState) -> bool:
    """Return True if `final` names the last weights.

    A trainer that starts again after the end saves them once more, as a version of its own epoch.
    """
    try:
        version = WeightVersion.parse(final)
    except DecodeError:
        return False
    return version == head.version or (
        head.phase == "done" and version.step == head.step and in_lineage(version, head.lineage)
    )


def _history(folder: RunFolder, record: RunRecord, head: TrainerState) -> str | None:
    """Difference between recorded amendments and the checkpoint's; None if they agree."""
    began, before = dict(head.lineage), dict[str, object]()
    known = list[Amended]()
    for epoch, changed in head.settings:
        if before:
            known.append((began.get(epoch, 0), {key: [before.get(key), value] for key, value in changed.items()}))
        before |= changed
    recorded = [
        (one.from_step, {key: list(values) for key, values in one.changes.items()}) for one in record.amendments
    ]
    undone = set() if record.finished else {v.step for v in archive.versions(folder.archive) if v.epoch < head.epoch}
    ahead = _beyond(recorded, known, undone)
    if ahead is not None and (not ahead or (len(ahead) == 1 and ahead[0][0] == head.step and not record.finished)):
        return None
    return f"it records {recorded}, the checkpoint {known}"[:300]


def _beyond(recorded: Sequence[Amended], known: Sequence[Amended], undone: Set[int]) -> Sequence[Amended] | None:
    """Amendments of run.json that follow all those of the checkpoint; None if the two differ.

    A trainer that found the newest checkpoint damaged resumed before the step that run.json names; that step is
    archived, and in `undone`. If it resumed before several amendments, it then made them at once.
    """
    for step, changes in known:
        together: dict[str, list[object]] = {}
        while (
            recorded
            and together != changes
            and (recorded[0][0] == step or (recorded[0][0] > step and recorded[0][0] in undone))
        ):
            for key, (was, now) in recorded[0][1].items():
                together[key] = [together.get(key, [was])[0], now]
            recorded = recorded[1:]
        if together != changes:
            return None
    return recorded


def _differing(file: str, changes: list[pinned.Change], where: str) -> Iterator[Violation]:
    for change in changes[:_MOST_NAMED]:
        yield Violation(
            ViolationKind.CONFIG, f"{change.key} is {str(change.now)[:100]}, {str(change.was)[:100]} {where}", file=file
        )


def _of(folder: RunFolder, detail: str, kind: ViolationKind = ViolationKind.CONFIG) -> Violation:
    return Violation(kind, detail, file=folder.record.name)
