"""Report lines of versions that no trainer made.

They are among the lines that do not count (see shared.run.counted). `records.made` says which versions were made; a
replaced trainer may write a metrics line late.
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
from shared.run import archive, counted
from shared.run.folder import RunFolder
from shared.run.ledger import TRAINED, Line
from shared.run.state import TrainerState
from shared.types import Group, WeightVersion
from volley_proof.records import evaluations
from volley_proof.records.made import MadeVersions
from volley_proof.verify.violation import MOST_OF_A_KIND, Violation, ViolationKind

_MOST_READ = 100
"""Archived steps to read for undone ledger lines."""
type Told = dict[WeightVersion, int]
"""Versions named in a file, each with the number of its last line."""


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
    measured = _lines(folder.evals)
    invalid = [*evaluations.invalid_lines(measured)]
    sampled, bad = _sampled(folder.samples)
    made = MadeVersions(folder, head)
    for number, why in [*invalid, *evaluations.lines_after(measured, made.last_step)]:
        yield _of(folder.evals, f"line {number}: {why}")
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
        yield _of(folder.samples, f"samples of step {sampled}, but the newest step is {made.last_step}", sampled)


def _lines(path: Path) -> list[bytes]:
    """Lines of a file; none if it cannot be read, which another check reports."""
    try:
        return [*whole_lines(path)]
    except OSError:
        return []


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
    """Return True if a line is complete: an incomplete one is not JSON."""
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


def _of(path: Path, detail: str, step: int | None = None) -> Violation:
    return Violation(ViolationKind.METRICS, detail, step=step, file=path.name)
