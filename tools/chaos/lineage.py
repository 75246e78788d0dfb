"""Compare the final weights of two runs, and count retried episodes and tickets without training."""

from __future__ import annotations

from collections.abc import Iterator

from shared.errors import DecodeError, WeightsError
from shared.files.storage import whole_lines
from shared.run import archive, checkpoint_files, commits, ledger
from shared.run import state as states
from shared.run.folder import RunFolder
from shared.run.ledger import TRAINED
from shared.run.lineage import in_lineage
from shared.run.state import TrainerState
from shared.types import Group
from tools.simulated.content import content_of

_MOST_TOLD = 10


def head(folder: RunFolder) -> TrainerState:
    """Newest durable state. Raises WeightsError if there is none."""
    newest = commits.newest(folder)
    if newest is None:
        raise WeightsError(f"{folder.path} holds neither checkpoint nor commit record")
    return newest


def difference(ours: RunFolder, theirs: RunFolder) -> str | None:
    """Difference between the newest checkpoints of two runs (step, parameters, optimizer), or None."""
    try:
        a, b = _files(ours), _files(theirs)
    except WeightsError as error:
        return str(error)
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    if not names:
        return None
    files = f"{len(names)} of {len(a | b)} files differ from the run without faults, the first is {names[0]}"
    return "; ".join([files, _first_step(ours, theirs), *_untrained(ours)])


def _files(folder: RunFolder) -> dict[str, str]:
    """Digests of a checkpoint's files by name, and its step."""
    newest = checkpoint_files.newest(folder.checkpoints)
    if newest is None:
        raise WeightsError(f"{folder.checkpoints} holds no checkpoint")
    manifest, _ = states.verify(newest)
    _, optimizer = states.read(newest)
    return {"step": str(manifest.step)} | {file.name: file.blake3 for file in (*manifest.files, *optimizer)}


def _first_step(ours: RunFolder, theirs: RunFolder) -> str:
    """Sentence on the first step that trained other groups."""
    try:
        for (step, a), (_, b) in zip(_steps(ours), _steps(theirs), strict=False):
            if [content_of(group) for group in a] != [content_of(group) for group in b]:
                tickets, instead = ([group.ticket for group in groups] for groups in (a, b))
                return f"from step {step} on, which trained other groups: {tickets}, without faults {instead}"
    except (WeightsError, DecodeError) as error:
        return str(error)
    return "every step trained the same groups"


def _untrained(folder: RunFolder) -> list[str]:
    """Sentence on tickets that ended without training, if any."""
    lines = [line for line in map(ledger.parse, whole_lines(folder.ledger)) if line is not None]
    ends = [
        f"{ticket} {line['disposition']} ({line['reason']})"
        for ticket, line in sorted(ledger.settled(lines).items())
        if line["disposition"] != TRAINED
    ]
    return [f"{len(ends)} tickets ended without training: {', '.join(ends[:_MOST_TOLD])}"] if ends else []


def _steps(folder: RunFolder) -> Iterator[tuple[int, list[Group]]]:
    """Yield the surviving steps in order. Raises WeightsError and DecodeError."""
    last = head(folder)
    for version in archive.versions(folder.archive):
        if in_lineage(version, last.lineage) and version.step <= last.step:
            yield version.step, [Group.decode(part) for part in archive.read(folder.archive, folder.name, version)]


def retried_episodes(folder: RunFolder) -> int:
    """Number of trained episodes with more than one attempt.

    Raises WeightsError, or DecodeError if the archive is damaged.
    """
    return sum(bool(one.failures) for _, groups in _steps(folder) for group in groups for one in group.trajectories)


def retained_steps(folder: RunFolder) -> list[int]:
    """Steps of the checkpoints along the lineage of the newest. Raises WeightsError."""
    lineage = head(folder).lineage
    return [version.step for version in checkpoint_files.versions(folder.checkpoints) if in_lineage(version, lineage)]
