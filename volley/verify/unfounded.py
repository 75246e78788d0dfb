"""Report lines of versions that no trainer made.

They are among the lines that do not count (see shared.run.counted). A step that was undone is in the archive: its
groups were archived before any line named it. The first version of an epoch has no groups, but the epoch's folder
exists. A run filled from a bucket may lack both. A replaced trainer may write a metrics line late. No line names a
version before its commit record is durable, so none is newer than the newest record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import orjson

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.errors import DecodeError
from shared.files.reading import whole_lines
from shared.run import archive, commits, counted
from shared.run.folder import RunFolder
from shared.run.ledger import TRAINED, Line
from shared.run.state import TrainerState
from shared.types import Group, WeightVersion
from volley.verify import evaluations
from volley.verify.violation import MOST_OF_A_KIND, Violation, ViolationKind

_MOST_READ = 100
"""Archived steps to read for undone ledger lines."""
type Told = dict[WeightVersion, int]
"""Versions named in a file, each with the number of its last line."""


class MadeVersions:
    """Steps and versions that the trainers of a run made, according to the run's files.

    Create it after reading the lines: a running trainer makes further versions.
    """

    def __init__(self, folder: RunFolder, head: TrainerState) -> None:
        self._head = head
        self._archived = set(archive.versions(folder.archive))
        self._claimed = archive.epochs(folder.archive)
        self._has_records = bool(commits.versions(folder.archive))
        self.newest = max([head.version, *commits.committed(folder)])
        self._is_partial = folder.bucket.exists()
        self.last_step = max(self.newest.step, *(version.step for version in self._archived), 0)
        self.has_log = self._has_records or head.files is not None

    def unrecorded(self) -> list[WeightVersion]:
        """Archived steps of the newest epoch whose preceding step has no record.

        A trainer archives the groups of a step after the record of the step before.
        """
        epoch, step = self.newest.epoch, self.newest.step
        return sorted(v for v in self._archived if self.has_log and v.epoch == epoch and v.step > step + 1)

    def why_not(self, version: WeightVersion) -> str | None:
        """Reason why no trainer can have written a line of the version; None if one can."""
        newest, head = self.newest, self._head
        if counted.is_ancestor(version, head) or (
            head.epoch == version.epoch and head.step < version.step <= newest.step
        ):
            return None
        if version.epoch == newest.epoch and version.step > newest.step:
            is_made = version in self._archived and not self.has_log
            return None if is_made else f"{version} was never made: the newest step is {newest}"
        if version in self._archived or (self._is_partial and version.epoch < newest.epoch):
            return None
        began = {epoch for epoch, _ in head.lineage}
        if version.epoch not in began and version.epoch in self._claimed and version.step <= self.last_step:
            return None
        return f"{version} was never made: its groups are not in the archive"


def read_versions(path: Path) -> tuple[Told, list[Violation]]:
    """Versions named in a file, and violations for unreadable lines, except those cut by a crash."""
    found, bad = dict[WeightVersion, int](), list[Violation]()
    try:
        for number, text in enumerate(whole_lines(path), start=1):
            try:
                row: Mapping[str, Any] = codec.from_record(text, "a line", MAX_LINE_VALUES)
                found |= dict.fromkeys(counted.versions_of(row), number)
            except (DecodeError, TypeError, AttributeError) as error:
                if text.rstrip().endswith(b"}"):
                    detail = error.detail if isinstance(error, DecodeError) else str(error)
                    bad.append(_of(path, f"line {number} cannot be read: {detail}"))
    except OSError as error:
        bad.append(_of(path, f"it cannot be read: {error.strerror}"))
    return found, bad


def check(folder: RunFolder, head: TrainerState, but: Set[WeightVersion]) -> Iterator[Violation]:
    """Check the versions in metrics, evaluations, hand-overs and saved checkpoints, and the steps of samples.

    Args:
        but: versions that another check has reported.
    """
    files = (folder.metrics, folder.evals, folder.handovers, folder.saved)
    found = {path: read_versions(path) for path in files}
    unfit = [*evaluations.check(folder.evals)]
    sampled, bad = _sampled(folder.samples)
    made = MadeVersions(folder, head)
    yield from unfit
    yield from evaluations.beyond(folder.evals, made.last_step)
    for path, (versions, unreadable) in found.items():
        yield from unreadable if path != folder.metrics else ()  # the check of metrics reports these
        for version, number in versions.items():
            is_late = path == folder.metrics and version.epoch < head.epoch and version.step <= head.step
            if version not in but and not is_late and (why := made.why_not(version)) is not None:
                yield _of(path, f"line {number}: {why}", version.step)
    for version in made.unrecorded()[:MOST_OF_A_KIND]:
        detail = f"it was made after step {version.step - 1}, which has no record: the newest is {made.newest}"
        yield Violation(ViolationKind.COMMIT, detail, step=version.step, file=folder.archive.name)
    yield from bad
    if not folder.bucket.exists() and sampled > max([made.last_step, *(version.step for version in but)]):
        yield _of(folder.samples, f"samples of step {sampled}, the newest step is {made.last_step}", sampled)


def check_supervised(folder: RunFolder, head: TrainerState) -> Iterator[Violation]:
    """Check a finished run; in a running one, lines may be of steps that no checkpoint holds yet."""
    for version, number in read_versions(folder.sft)[0].items():
        if version.epoch == head.epoch and version.step > head.step:
            yield _of(
                folder.sft, f"line {number}: {version} was never made: the last step is {head.version}", version.step
            )


def check_ledger(
    lines: Iterable[Line], undone: Iterable[Line], folder: RunFolder, run: str, head: TrainerState
) -> Iterator[Violation]:
    """Check ledger lines that do not count: their versions and, for trained ones, their archived groups."""
    made, known = MadeVersions(folder, head), dict[tuple[int, int], str | None]()
    for one in lines:
        if one.get("disposition", TRAINED) == TRAINED:
            continue
        place = one["epoch"], one["step"]
        if place not in known:
            known[place] = made.why_not(WeightVersion(*place))
        if (why := known[place]) is not None and one["step"] <= made.last_step:  # another check reports later ones
            yield Violation(ViolationKind.LEDGER, why, one["ticket"], one["step"], folder.ledger.name)
    groups = dict[WeightVersion, Mapping[int, str] | None]()
    for one in undone:
        version = WeightVersion(one["epoch"], one["step"])
        if version not in groups and len(groups) < _MOST_READ:
            groups[version] = _groups(folder, run, version)
        found = groups.get(version)
        if found is None:
            continue
        if found.get(one["ticket"]) is None or one.get("digest") not in (None, found[one["ticket"]]):
            detail = f"it was not trained to {version}: the archive has no such group"
            yield Violation(ViolationKind.LEDGER, detail, one["ticket"], version.step, folder.ledger.name)


def _groups(folder: RunFolder, run: str, version: WeightVersion) -> Mapping[int, str] | None:
    """Digests of a step's groups by ticket; empty if it is not archived, None if a bucket may hold it."""
    if not archive.path_of(folder.archive, version).exists():
        return None if folder.bucket.exists() else {}
    try:
        payloads = archive.read(folder.archive, run, version)
        return {Group.decode(payload).ticket: archive.digest(payload) for payload in payloads}
    except DecodeError:
        return {}


def _sampled(path: Path) -> tuple[int, list[Violation]]:
    """Newest step of the samples, and violations for unreadable lines."""
    newest, bad = 0, list[Violation]()
    try:
        for number, text in enumerate(whole_lines(path), start=1):
            try:
                step = codec.from_record(text, "a line", MAX_LINE_VALUES)["step"]
                newest = max(newest, step if type(step) is int else 0)
            except (KeyError, TypeError):
                continue
            except DecodeError as error:
                if _is_json(text):
                    bad.append(_of(path, f"line {number} cannot be read: {error.detail}"))
    except OSError as error:
        return 0, [_of(path, f"it cannot be read: {error.strerror}")]
    return newest, bad


def _is_json(text: bytes) -> bool:
    """Tell if a line is complete: an incomplete one is not JSON."""
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


def _of(path: Path, detail: str, step: int | None = None) -> Violation:
    return Violation(ViolationKind.METRICS, detail, step=step, file=path.name)
