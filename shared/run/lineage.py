"""Which weights a run still stands on: the trainer's incarnations, from its newest checkpoint or commit record."""

from __future__ import annotations

from shared.run import commits
from shared.run.folder import RunFolder
from shared.types import WeightVersion

type Lineage = tuple[tuple[int, int], ...]
"""(epoch, step it began at), oldest first; see `shared.run.state.in_lineage`."""


def lineage_at(folder: RunFolder, version: WeightVersion) -> Lineage:
    """The lineage of the run whose queue is at `version`. Blocks on disk.

    The queue's step rises only after a checkpoint of its epoch is durable; so while there are only older ones, the
    epoch began right there. Where no checkpoint can be read, only weights of this epoch count.
    """
    newest = commits.newest(folder)
    if newest is None:
        return ((version.epoch, 0),)
    found = newest.lineage
    if any(epoch == version.epoch for epoch, _ in found):
        return found
    before = ((epoch, began) for epoch, began in found if epoch < version.epoch and began <= version.step)
    return (*before, (version.epoch, version.step))
