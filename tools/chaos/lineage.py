"""The end of a run's folder: the bits of its newest weights, and how its episodes fared."""

from __future__ import annotations

from shared.errors import WeightsError
from shared.run import archive, weights
from shared.run import state as states
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.types import Group


def head(folder: RunFolder) -> TrainerState:
    """Raises WeightsError if the newest checkpoint is not whole, or there is none."""
    newest = weights.newest(folder.checkpoints)
    if newest is None:
        raise WeightsError(f"{folder.checkpoints} holds no checkpoint")
    return states.verify(newest)[1]


def difference(ours: RunFolder, theirs: RunFolder) -> str | None:
    """The first difference between the newest checkpoints of two runs: step, parameters, optimizer; None if there is
    none.
    """
    try:
        a, b = _files(ours), _files(theirs)
    except WeightsError as error:
        return str(error)
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return (
        f"{len(names)} of {len(a | b)} files differ from the run without faults, the first is {names[0]}"
        if names
        else None
    )


def _files(folder: RunFolder) -> dict[str, str]:
    """Digest by name; the step is one of them."""
    newest = weights.newest(folder.checkpoints)
    if newest is None:
        raise WeightsError(f"{folder.checkpoints} holds no checkpoint")
    manifest, _ = states.verify(newest)
    _, optimizer = states.read(newest)
    return {"step": str(manifest.step)} | {file.name: file.blake3 for file in (*manifest.files, *optimizer)}


def retried_episodes(folder: RunFolder) -> int:
    """How many trained episodes needed more than one attempt. Raises WeightsError, or DecodeError if the archive is
    damaged.
    """
    last = head(folder)
    steps = [
        version
        for version in archive.versions(folder.archive)
        if states.in_lineage(version, last.lineage) and version.step <= last.step
    ]
    groups = (
        Group.decode(payload) for version in steps for payload in archive.read(folder.archive, folder.name, version)
    )
    return sum(bool(one.failures) for group in groups for one in group.trajectories)


def retained_steps(folder: RunFolder) -> list[int]:
    """Steps of the checkpoints along the lineage of the newest. Raises WeightsError."""
    lineage = head(folder).lineage
    return [version.step for version in weights.versions(folder.checkpoints) if states.in_lineage(version, lineage)]
