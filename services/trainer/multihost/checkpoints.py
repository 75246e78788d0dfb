"""The checkpoint folders of a trainer of several processes, which all reach the same files.

Process 0 decides (which checkpoint is whole, where a new one is made, when it gets its name), every process reads and
writes the arrays that lie on its own devices.

Invariant: a folder gets its name after every process has said that what it wrote is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.trainer.checkpoints import store
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import PARAMS, CheckpointFolders, training_arrays
from services.trainer.models.arrays import Arrays, CheckpointContents, HostArray, RestoredCheckpoint
from services.trainer.multihost.processes import Follower, Leader
from shared.errors import VolleyError
from shared.files.storage import storage
from shared.models.origin import Origin
from shared.run.checkpoint_files import Adapter, BaseWeights
from shared.run.state import TrainerState
from shared.types import WeightVersion


class SharedArrays(OrbaxArrays):
    """Process 0's: a folder of arrays is written when all have written their shards."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def write(self, folder: Path, arrays: Arrays) -> None:
        folder.mkdir()
        number = self._leader.tell("write", value=str(folder))
        try:
            self.write_shards(folder, arrays)
        finally:
            self._leader.outcomes(number)
        self.finish(folder)


class LeadingCheckpoints(CheckpointFolders):
    """Process 0's: what it found or made, the others are told."""

    def __init__(self, root: Path, run: str, max_to_keep: int, leader: Leader) -> None:
        super().__init__(root, run, max_to_keep, SharedArrays(leader))
        self._leader = leader

    def newest(self) -> RestoredCheckpoint | None:
        found = super().newest()
        self._tell(None if found is None else found.folder.name)
        return found

    def save(self, state: TrainerState, contents: CheckpointContents, base: WeightVersion | None) -> Path:
        return self._told(super().save(state, contents, base))

    def save_base(self, version: WeightVersion, params: Arrays) -> BaseWeights:
        base = super().save_base(version, params)
        self._tell(asdict(base) | {"files": [], "tree": []})
        return base

    def relabel(self, restored: RestoredCheckpoint, state: TrainerState) -> Path:
        return self._told(super().relabel(restored, state))

    def restored(self, version: WeightVersion) -> RestoredCheckpoint:
        found = super().restored(version)
        self._tell(found.folder.name)
        return found

    def params_of(self, version: str) -> Mapping[str, HostArray]:
        found = super().params_of(version)
        self._tell(version)
        return found

    def base_of(self, restored: RestoredCheckpoint) -> dict[str, HostArray]:
        found = super().base_of(restored)
        self._tell(None)
        return found

    def foreign(self, origin: Origin) -> RestoredCheckpoint:
        found = super().foreign(origin)
        self._tell(None)
        return found

    def _told(self, folder: Path) -> Path:
        self._tell(folder.name)
        return folder

    def _tell(self, value: Any) -> None:
        self._leader.tell("value", value=value)


class FollowingCheckpoints:
    """Any other process's; see `CheckpointFolders`. What process 0 has verified is read without a second look."""

    def __init__(self, root: Path, follower: Follower) -> None:
        self.root, self._follower, self._arrays = root.absolute(), follower, OrbaxArrays()

    def newest(self) -> RestoredCheckpoint | None:
        version = self._follower.told()
        return None if version is None else self._opened(self.root / version)

    def save(self, state: TrainerState, contents: CheckpointContents, base: WeightVersion | None) -> Path:
        self._write(contents.params)
        self._write(training_arrays(contents))
        return self.root / self._follower.told()

    def save_base(self, version: WeightVersion, params: Arrays) -> BaseWeights:
        self._write(params)
        return BaseWeights(self._follower.told()["digest"], (), ())

    def relabel(self, restored: RestoredCheckpoint, state: TrainerState) -> Path:
        return self.root / self._follower.told()

    def restored(self, version: WeightVersion) -> RestoredCheckpoint:
        return self._opened(self.root / self._follower.told())

    def params_of(self, version: str) -> Mapping[str, HostArray]:
        return self._opened(self.root / self._follower.told()).params

    def base_of(self, restored: RestoredCheckpoint) -> Mapping[str, HostArray]:
        self._follower.told()
        adapter: Adapter | None = restored.adapter
        if adapter is None:
            return {}
        return self._arrays.read(adapter.base.folder(restored.folder.parent) / PARAMS)

    def foreign(self, origin: Origin) -> RestoredCheckpoint:
        self._follower.told()
        return self._opened(origin.checkpoint)

    def _opened(self, folder: Path) -> RestoredCheckpoint:
        return store.opened(folder, self._arrays)

    def _write(self, arrays: Arrays) -> None:
        """Our shards of the next folder that process 0 makes. Raises the error that either of us met."""
        asked = self._follower.asked()
        error: VolleyError | None = None
        try:
            with storage(self.root):
                self._arrays.write_shards(Path(asked["value"]), arrays)
        except VolleyError as met:
            error = met
        self._follower.report(asked["number"], error)
