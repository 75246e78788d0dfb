"""Versions that a run's trainers made, according to its files.

A step that was undone is in the archive: its groups were archived before any line named it. The first version of an
epoch has no groups, but the epoch's folder exists. A run filled from a bucket may lack both. No line names a version
before its commit record is durable, so none is newer than the newest record.
"""

from __future__ import annotations

from shared.run import archive, commits, counted
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.types import WeightVersion


class MadeVersions:
    """Steps and versions that the trainers of a run made, according to the run's files.

    Create it after reading the lines: a running trainer makes further versions.
    """

    def __init__(self, folder: RunFolder, head: TrainerState) -> None:
        self._head = head
        self._archived = set(archive.versions(folder.archive))
        self._claimed = archive.epochs(folder.archive)
        self.newest = max([head.version, *commits.committed(folder)])
        self._is_partial = folder.bucket.exists()
        self.last_step = max(self.newest.step, *(version.step for version in self._archived), 0)

    def unrecorded(self) -> list[WeightVersion]:
        """Archived steps of the newest epoch whose preceding step has no record.

        A trainer archives the groups of a step after the record of the step before.
        """
        epoch, step = self.newest.epoch, self.newest.step
        return sorted(v for v in self._archived if v.epoch == epoch and v.step > step + 1)

    def why_not(self, version: WeightVersion) -> str | None:
        """Return why no trainer can have written a line of the version; None if one can."""
        newest, head = self.newest, self._head
        if counted.is_ancestor(version, head) or (
            head.epoch == version.epoch and head.step < version.step <= newest.step
        ):
            return None
        if version.epoch == newest.epoch and version.step > newest.step:
            return f"{version} was never made: the newest step is {newest}"
        if version in self._archived or (self._is_partial and version.epoch < newest.epoch):
            return None
        began = {epoch for epoch, _ in head.lineage}
        if version.epoch not in began and version.epoch in self._claimed and version.step <= self.last_step:
            return None
        return f"{version} was never made: its groups are not in the archive"
