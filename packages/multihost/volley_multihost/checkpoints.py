"""Checkpoint folders of a trainer of several processes on a shared file system.

Process 0 decides which checkpoint is valid, where a new one is written and when it gets its name. Every process reads
and writes the arrays of its own devices.

Invariant: a folder gets its name after every process has reported that its arrays are written.
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
from shared.errors import VolleyError
from shared.files.storage import storage
from shared.models.origin import Origin
from shared.run.checkpoint_files import Adapter, BaseWeights
from shared.run.state import TrainerState
from shared.types import WeightVersion
from volley_multihost.processes import Follower, Leader


class SharedArrays(OrbaxArrays):
    """Arrays of process 0: a folder is complete once all processes have written their shards."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def write(self, folder: Path, arrays: Arrays) -> None:
        folder.mkdir()
        number = self._leader.send("write", value=str(folder))
        try:
            self.write_shards(folder, arrays)
        finally:
            self._leader.outcomes(number)
        self.finish(folder)


class LeadingCheckpoints(CheckpointFolders):
    """Checkpoint folders of process 0, which sends its results to the followers."""

    def __init__(self, root: Path, run: str, max_to_keep: int, leader: Leader) -> None:
        super().__init__(root, run, max_to_keep, SharedArrays(leader))
        self._leader = leader

    def newest(self) -> RestoredCheckpoint | None:
        found = super().newest()
        self._send(None if found is None else found.folder.name)
        return found

    def save(self, state: TrainerState, contents: CheckpointContents, base: WeightVersion | None) -> Path:
        return self._send_name(super().save(state, contents, base))

    def save_base(self, version: WeightVersion, params: Arrays) -> BaseWeights:
        base = super().save_base(version, params)
        self._send(asdict(base) | {"files": [], "tree": []})
        return base

    def relabel(self, restored: RestoredCheckpoint, state: TrainerState) -> Path:
        return self._send_name(super().relabel(restored, state))

    def restored(self, version: WeightVersion) -> RestoredCheckpoint:
        found = super().restored(version)
        self._send(found.folder.name)
        return found

    def params_of(self, version: str) -> Mapping[str, HostArray]:
        found = super().params_of(version)
        self._send(version)
        return found

    def base_of(self, restored: RestoredCheckpoint) -> dict[str, HostArray]:
        found = super().base_of(restored)
        self._send(None)
        return found

    def foreign(self, origin: Origin) -> RestoredCheckpoint:
        found = super().foreign(origin)
        self._send(None)
        return found

    def _send_name(self, folder: Path) -> Path:
        self._send(folder.name)
        return folder

    def _send(self, value: Any) -> None:
        self._leader.send("value", value=value)


class FollowingCheckpoints:
    """Checkpoint folders of a follower; see `CheckpointFolders`. Only process 0 verifies checkpoints."""

    def __init__(self, root: Path, follower: Follower) -> None:
        self.root, self._follower, self._arrays = root.absolute(), follower, OrbaxArrays()

    def newest(self) -> RestoredCheckpoint | None:
        version = self._follower.receive_value()
        return None if version is None else self._opened(self.root / version)

    def save(self, state: TrainerState, contents: CheckpointContents, base: WeightVersion | None) -> Path:
        self._write(contents.params)
        self._write(training_arrays(contents))
        return self.root / self._follower.receive_value()

    def save_base(self, version: WeightVersion, params: Arrays) -> BaseWeights:
        self._write(params)
        return BaseWeights(self._follower.receive_value()["digest"], (), ())

    def relabel(self, restored: RestoredCheckpoint, state: TrainerState) -> Path:
        return self.root / self._follower.receive_value()

    def restored(self, version: WeightVersion) -> RestoredCheckpoint:
        return self._opened(self.root / self._follower.receive_value())

    def params_of(self, version: str) -> Mapping[str, HostArray]:
        return self._opened(self.root / self._follower.receive_value()).params

    def base_of(self, restored: RestoredCheckpoint) -> Mapping[str, HostArray]:
        self._follower.receive_value()
        adapter: Adapter | None = restored.adapter
        if adapter is None:
            return {}
        return self._arrays.read(adapter.base.folder(restored.folder.parent) / PARAMS)

    def foreign(self, origin: Origin) -> RestoredCheckpoint:
        self._follower.receive_value()
        return self._opened(origin.checkpoint)

    def _opened(self, folder: Path) -> RestoredCheckpoint:
        return store.opened(folder, self._arrays)

    def _write(self, arrays: Arrays) -> None:
        """Write this process's shards of the next folder of process 0, and report the result.

        Raises an error of process 0.
        """
        asked = self._follower.receive_message()
        error: VolleyError | None = None
        try:
            with storage(self.root):
                self._arrays.write_shards(Path(asked["value"]), arrays)
        except VolleyError as met:
            error = met
        self._follower.report(asked["number"], error)
