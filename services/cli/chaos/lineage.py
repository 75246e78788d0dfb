"""The end of a run's folder: the bits of its newest weights, and whether a replaced trainer has a say in them."""

from __future__ import annotations

from collections.abc import Sequence

from services.cli.chaos.arena import Zombie
from services.cli.layout import RunFolder
from services.cli.verify import tickets
from shared import state as states
from shared import weights
from shared.errors import WeightsError
from shared.state import TrainerState


def head(folder: RunFolder) -> TrainerState:
    """Raises WeightsError if the newest checkpoint is not whole, or there is none."""
    newest = weights.newest(folder.checkpoints)
    if newest is None:
        raise WeightsError(f"{folder.checkpoints} holds no checkpoint")
    return states.verify(newest)[1]


def difference(ours: RunFolder, theirs: RunFolder) -> str | None:
    """The first difference between the newest checkpoints of two runs: step, parameters, optimizer; None if there is none."""
    try:
        a, b = _files(ours), _files(theirs)
    except WeightsError as error:
        return str(error)
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return f"{len(names)} of {len(a | b)} files differ from the run without faults, the first is {names[0]}" if names else None


def _files(folder: RunFolder) -> dict[str, str]:
    """Digest by name; the step is one of them."""
    newest = weights.newest(folder.checkpoints)
    if newest is None:
        raise WeightsError(f"{folder.checkpoints} holds no checkpoint")
    manifest, _ = states.verify(newest)
    _, optimizer = states.read(newest)
    return {"step": str(manifest.step)} | {file.name: file.blake3 for file in (*manifest.files, *optimizer)}


def counting(folder: RunFolder, zombies: Sequence[Zombie]) -> list[str]:
    """Lines of the ledger that count although their trainer was replaced before, each as a sentence."""
    lines, _ = tickets.read(folder.ledger)
    last = head(folder)
    fates = tickets.fates(tickets.with_pending(lines, last), last)
    replaced = {zombie.at.epoch: _end(zombie.at.epoch, last) for zombie in zombies}
    return [
        f"ticket {line['ticket']} counts as trained at step {step} by epoch {line['epoch']}, which was replaced at step {end}"
        for step, trained in sorted(fates.steps.items())
        for line in trained
        if (end := replaced.get(line["epoch"])) is not None and step > end
    ]


def _end(epoch: int, last: TrainerState) -> int | None:
    """The step at which the epoch after this one began; None if there is none."""
    return next((began for later, began in last.lineage if later > epoch), None)


def retained_steps(folder: RunFolder) -> list[int]:
    """Steps of the checkpoints along the lineage of the newest. Raises WeightsError."""
    lineage = head(folder).lineage
    return [version.step for version in weights.versions(folder.checkpoints) if states.in_lineage(version, lineage)]
