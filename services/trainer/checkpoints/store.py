"""Checkpoint folders: `{root}/{version}/{params/, optimizer/, state.json, manifest.json}`.

`ArrayFiles` writes and reads the arrays.

Invariants:
- a folder has its name if and only if it is complete: it is made under another name, its manifest last, and renamed
  once durable;
- once `fence` has returned, no trainer of an earlier epoch gives a folder its name: drafts are made in a folder of
  their epoch; `fence` creates that of its own epoch and removes those of earlier ones;
- rollout servers load `params/`; only a resume needs `optimizer/`, which also has the float32 parameters if the
  published ones are rounded, so a resume is bit-exact;
- with adapters `params/` holds only those; their base is stored once, in `{root}/base/{digest}/params/`, durable before
  the first checkpoint that names it;
- a folder whose digests differ, or whose steps a later trainer undid, is never restored: the next older one is used,
  and once all older trainers are fenced the damaged one is moved to `{root}/bad/{version}`.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.interfaces import RunChecks
from services.trainer.models.arrays import (
    Array,
    ArrayFiles,
    Arrays,
    CheckpointContents,
    HostArray,
    RestoredCheckpoint,
)
from shared import packages
from shared.errors import ConfigError, Forbidden, Unavailable, WeightsError
from shared.files import storage
from shared.models.origin import Origin
from shared.process import telemetry
from shared.run import archive, checkpoint_files, commits, saved
from shared.run import state as states
from shared.run.best import best_version
from shared.run.checkpoint_files import BAD, Adapter, BaseWeights, Manifest, ManifestFile, ManifestLeaf
from shared.run.folder import RunFolder
from shared.run.lineage import surviving
from shared.run.state import OPTIMIZER, TrainerState
from shared.types import WeightVersion

PARAMS = "params"
_MASTER = "master"
_DRAFT = ".tmp-"
_log = telemetry.Log("checkpoint")


class CheckpointFolders:
    """Checkpoint folders of one run. All methods block.

    Args:
        root: parent of the version folders; created if missing.
        max_to_keep: steps to keep, in addition to the reference version and the one that solved the most held-out
            tasks.

    `bad` has the versions that `newest` found damaged, with the reason.
    """

    def __init__(self, root: Path, run: str, max_to_keep: int, arrays: ArrayFiles) -> None:
        self.root, self._run, self._max_to_keep, self._arrays = root.absolute(), run, max_to_keep, arrays
        self.bad: dict[str, str] = {}
        self.root.mkdir(parents=True, exist_ok=True)

    def newest(self) -> RestoredCheckpoint | None:
        """Restore the newest checkpoint that is valid and not undone; None if there are no checkpoints. Reads only.

        Raises WeightsError if there are checkpoints, but none is valid; ConfigError if one is of another run; and
        Unavailable if one cannot be read now: it may be undamaged, so no older one is used.
        """
        for version in reversed(self._candidates()):
            try:
                return self._restore(version)
            except (WeightsError, Forbidden) as error:
                if (self.root / str(version)).exists():  # otherwise another trainer has removed it
                    self.bad[str(version)] = str(error)
                    _log.error("checkpoint skipped", version=str(version), reason=str(error))
        if n := len(checkpoint_files.versions(self.root)):
            raise WeightsError(
                f"none of the {n} checkpoints in {self.root} is valid",
                "restore a checkpoint, or start a run with another name",
            )
        return None

    def head(self) -> WeightVersion | None:
        """Return the version of the newest checkpoint, without those that `newest` skipped."""
        return next(reversed(self._candidates()), None)

    def oldest_step(self) -> int:
        """Return the oldest step of the retained checkpoints: a resume does not need earlier steps of the log."""
        retained = _retained(checkpoint_files.versions(self.root), self._max_to_keep)
        return min((version.step for version in retained), default=0)

    def metrics(self) -> list[Mapping[str, Any]]:
        """Return the lines of metrics in all retained checkpoints, the newest checkpoint's first."""
        lines: list[Mapping[str, Any]] = []
        for version in reversed(self._candidates()):
            with suppress(WeightsError, Unavailable):  # damaged, or removed by another trainer
                lines += states.read(self.root / str(version))[0].metrics
        return lines

    def fence(self, epoch: int) -> None:
        """Create the drafts folder of the claimed `epoch`, and remove those of earlier epochs with their leftovers.

        A trainer that still writes a checkpoint there gets Fenced. Raises StorageFull.
        """
        with storage.storage(self.root):
            (self.root / _drafts(epoch)).mkdir(exist_ok=True)
            storage.fsync(self.root)
        for leftover in self.root.glob(f"{_DRAFT}*"):
            if not (of := _epoch_of(leftover.name)):
                shutil.rmtree(leftover, ignore_errors=True)
            elif of < epoch:
                self._remove(leftover.name)

    def repair(self) -> None:
        """Move damaged checkpoints to `bad/`, and add missing ones to checkpoints.jsonl.

        Earlier trainers must be fenced. Raises StorageFull.
        """
        with storage.storage(self.root):
            for version in self.bad:
                (self.root / BAD).mkdir(exist_ok=True)
                if (self.root / version).exists():
                    shutil.rmtree(self.root / BAD / version, ignore_errors=True)
                    (self.root / version).rename(self.root / BAD / version)
        storage.blank_torn_line(RunFolder(self.root.parent).saved)
        known = saved.named(RunFolder(self.root.parent))
        for version in self._candidates():
            if version not in known:
                saved.append(
                    self.root, version, checkpoint_files.digest(self.root / str(version) / checkpoint_files.MANIFEST)
                )

    def save(self, state: TrainerState, contents: CheckpointContents, base: WeightVersion | None) -> Path:
        """Write `state.version` durably, then remove old versions; return its folder.

        Raises StorageFull, WeightsError if its state is larger than a reader accepts, and Fenced if a later epoch has
        called `fence`, or its own has not; then no folder is left.
        """
        training = training_arrays(contents)
        with self._draft(state.version) as draft:
            storage.check_room(draft, _n_bytes(contents.params) + _n_bytes(training))
            with storage.held(draft):
                self._arrays.write(draft / PARAMS, contents.params)
                self._arrays.write(draft / OPTIMIZER, training)
            manifest = Manifest(
                run=self._run,
                version=str(state.version),
                base_version=None if base is None else str(base),
                step=state.step,
                kind="adapter" if contents.adapter else "full",
                path=PARAMS,
                files=checkpoint_files.digest_files(draft, PARAMS),
                tree=_tree(contents.params),
                model=contents.model,
                probe=contents.probe,
                created=time.time(),
                adapter=contents.adapter,
            )
            return self._install(draft, manifest, checkpoint_files.digest_files(draft, OPTIMIZER), state)

    def save_base(self, version: WeightVersion, params: Arrays) -> BaseWeights:
        """Write the adapters' base durably, before `version`, the first checkpoint with adapters. Raises as `save`."""
        with self._draft(version) as draft:
            storage.check_room(draft, _n_bytes(params))
            with storage.held(draft):
                self._arrays.write(draft / PARAMS, params)
            base = BaseWeights.of(checkpoint_files.digest_files(draft, PARAMS), _tree(params))
            storage.sync_tree(draft)
            (self.root / checkpoint_files.BASE).mkdir(exist_ok=True)
            storage.fsync(self.root)
            shutil.rmtree(base.folder(self.root), ignore_errors=True)
            draft.rename(base.folder(self.root))
            storage.fsync(self.root / checkpoint_files.BASE)
        return base

    def relabel(self, restored: RestoredCheckpoint, state: TrainerState) -> Path:
        """Save the restored checkpoint as the first version of a new epoch.

        Files are linked, not copied; their digests were verified by the restore. Raises as `save`.
        """
        with self._draft(state.version) as draft:
            with storage.held(draft):
                for name in (PARAMS, OPTIMIZER):
                    storage.link_tree(restored.folder / name, draft / name)
            old = checkpoint_files.read_manifest(restored.folder)
            manifest = replace(old, version=str(state.version), base_version=old.version, created=time.time())
            return self._install(draft, manifest, states.read(restored.folder)[1], state)

    def restored(self, version: WeightVersion) -> RestoredCheckpoint:
        """Restore a checkpoint with its optimizer. Raises WeightsError, and Unavailable if it cannot be read now."""
        return restore(self.root / str(version), self._arrays)

    def params_of(self, version: str) -> Mapping[str, HostArray]:
        """Read a version's float32 parameters, exact even if the published ones are rounded. Raises WeightsError."""
        return restore(self.root / version, self._arrays).params

    def base_of(self, restored: RestoredCheckpoint) -> dict[str, HostArray]:
        """Read the base of a checkpoint's adapters, of any run; empty if it has none. Raises as `read_base`."""
        return read_base(restored.folder.parent, restored.adapter, self._arrays) if restored.adapter else {}

    def foreign(self, origin: Origin) -> RestoredCheckpoint:
        """Restore a checkpoint of another run, to start from. Raises ConfigError if it is damaged or was changed."""
        try:
            if checkpoint_files.digest(origin.checkpoint / checkpoint_files.MANIFEST) != origin.manifest:
                raise WeightsError("its manifest has changed since the run was started")
            found = restore(origin.checkpoint, self._arrays)
            checks: RunChecks | None = packages.part("run_checks", required=False)
            if checks is not None:
                checks.check_log(origin.checkpoint)
            else:
                _log.warning("checkpoint not compared with its run's log", needs=packages.OWNERS["run_checks"])
            return found
        except (WeightsError, Forbidden, OSError) as error:
            there = ", ".join(map(str, checkpoint_files.versions(origin.checkpoint.parent))) or "none"
            raise ConfigError(
                f"model.path={origin.path} cannot be used: {error}",
                f"choose another version of run {origin.run}; retained are {there}",
            ) from error

    def _candidates(self) -> list[WeightVersion]:
        """Versions that may be restored, oldest first."""
        found = set(checkpoint_files.versions(self.root))
        logged = commits.versions(RunFolder(self.root.parent).archive)
        return [v for v in surviving(sorted({*found, *logged})) if v in found and str(v) not in self.bad]

    def _restore(self, version: WeightVersion) -> RestoredCheckpoint:
        folder = self.root / str(version)
        run = checkpoint_files.read_manifest(folder).run
        if run != self._run:
            raise ConfigError(
                f"the checkpoint {folder} is of run {run}, not of {self._run}", "choose another run.name or run.dir"
            )
        return restore(folder, self._arrays)

    @contextmanager
    def _draft(self, version: WeightVersion) -> Iterator[Path]:
        """Make a draft folder for a checkpoint; it is removed at the end unless it was renamed."""
        draft = self.root / _drafts(version.epoch) / f"{version}-{os.getpid()}"
        self._restore_root(version.epoch)
        shutil.rmtree(draft, ignore_errors=True)
        with storage.storage(self.root):
            try:
                draft.mkdir()
                yield draft
            finally:
                shutil.rmtree(draft, ignore_errors=True)

    def _restore_root(self, epoch: int) -> None:
        """Create the folder of checkpoints again if it was removed, unless a newer trainer has begun."""
        folder = RunFolder(self.root.parent)
        if not self.root.exists() and max(archive.epochs(folder.archive), default=0) == epoch:
            with storage.storage(folder.path):
                self.root.mkdir(exist_ok=True)
            self.fence(epoch)

    def _install(
        self, draft: Path, manifest: Manifest, optimizer_files: Sequence[ManifestFile], state: TrainerState
    ) -> Path:
        (draft / states.STATE).write_bytes(
            state.to_json(optimizer_files=optimizer_files, seal=checkpoint_files.seal(manifest))
        )
        states.check_readable(draft)
        manifest = replace(manifest, state=checkpoint_files.digest(draft / states.STATE))
        storage.sync_tree(draft)
        checkpoint_files.write_manifest(draft, manifest)
        saved.append(self.root, state.version, checkpoint_files.digest(draft / checkpoint_files.MANIFEST))
        folder = self.root / manifest.version
        self._remove(folder.name)
        draft.rename(folder)
        storage.fsync(self.root)
        self._retain(state)
        return folder

    def _retain(self, state: TrainerState) -> None:
        """Remove old checkpoints, unless a newer trainer has begun: it may need them."""
        found = checkpoint_files.versions(self.root)
        if found[-1] != state.version:
            return
        best = best_version(RunFolder(self.root.parent).evals, state.lineage, state.step)
        kept = {str(version) for version in _retained(found, self._max_to_keep)} | {state.reference}
        kept |= {str(best.version)} if best else set()
        for version in found:
            if str(version) not in kept:
                self._remove(str(version))
        self._retain_base(state.version)

    def _retain_base(self, version: WeightVersion) -> None:
        """Remove bases of trainers that ended before their first checkpoint."""
        bases = list((self.root / checkpoint_files.BASE).glob("*"))
        if len(bases) > 1:
            adapter = checkpoint_files.read_manifest(self.root / str(version)).adapter
            for base in bases:
                if adapter is None or base.name != adapter.base.digest:
                    shutil.rmtree(base, ignore_errors=True)

    def _remove(self, name: str) -> None:
        """Rename, then remove a folder: a partly removed one is never a checkpoint, and a trainer that still writes
        into a draft loses all of it.
        """
        away = self.root / f"{_DRAFT}removed-{name}-{os.getpid()}"
        with suppress(FileNotFoundError):
            (self.root / name).rename(away)
        shutil.rmtree(away, ignore_errors=True)


def restore(folder: Path, arrays: ArrayFiles) -> RestoredCheckpoint:
    """Verify and read a checkpoint; changes nothing.

    Raises WeightsError if it is damaged or its version is not its folder's name, and Unavailable if it cannot be read
    now.
    """
    manifest, state = states.verify(folder)
    if not manifest.version == str(state.version) == folder.name:
        raise WeightsError(f"{folder} holds the manifest of {manifest.version} and the state of {state.version}")
    found = opened(folder, arrays)
    for name, value in (*found.params.items(), *found.optimizer.items()):
        if not np.isfinite(value).all():
            raise WeightsError(
                f"{folder.name}: {name} is not finite",
                "use an older checkpoint: this one holds the weights of a non-finite step",
            )
    return found


def opened(folder: Path, arrays: ArrayFiles) -> RestoredCheckpoint:
    """Read a verified checkpoint. Raises WeightsError, and Unavailable if it cannot be read now."""
    manifest, (state, _) = checkpoint_files.read_manifest(folder), states.read(folder)
    try:
        training = arrays.read(folder / OPTIMIZER)
        params = _below(training, _MASTER) or arrays.read(folder / PARAMS)
    except OSError as error:
        raise checkpoint_files.unreadable(str(folder), error) from error
    return RestoredCheckpoint(folder, state, params, _below(training, "optimizer"), manifest.adapter)


def training_arrays(contents: CheckpointContents) -> dict[str, Array]:
    """Collect the stored arrays that only a resume needs."""
    training = {f"optimizer.{k}": v for k, v in contents.optimizer.items()}
    return training | {f"{_MASTER}.{k}": v for k, v in (contents.master or {}).items()}


def read_base(root: Path, adapter: Adapter, arrays: ArrayFiles) -> dict[str, HostArray]:
    """Read the base of adapters below `root`, in its published dtype.

    Raises WeightsError, and Unavailable if it cannot be read now.
    """
    checkpoint_files.verify_base(root, adapter.base)
    try:
        return arrays.read(adapter.base.folder(root) / PARAMS)
    except OSError as error:
        raise checkpoint_files.unreadable(f"base {adapter.base.digest}", error) from error


def _n_bytes(arrays: Arrays) -> int:
    return sum(math.prod(value.shape) * value.dtype.itemsize for value in arrays.values())


def _tree(params: Arrays) -> tuple[ManifestLeaf, ...]:
    return tuple(ManifestLeaf(k, tuple(v.shape), str(v.dtype)) for k, v in sorted(params.items()))


def _retained(found: Sequence[WeightVersion], n: int) -> set[WeightVersion]:
    """Select the `n` newest versions, and one of each of the `n` newest steps.

    So restarts without progress do not displace older steps.
    """
    alive = surviving(found)
    of_step = {version.step: version for version in alive}
    return {*alive[-n:], *(of_step[step] for step in sorted(of_step)[-n:])}


def _drafts(epoch: int) -> str:
    return f"{_DRAFT}e{epoch:06d}"


def _epoch_of(drafts: str) -> int:
    """Return the epoch of a drafts folder; 0 for a folder that is being removed."""
    digits = drafts.removeprefix(f"{_DRAFT}e")
    return int(digits) if digits.isdecimal() else 0


def _below(arrays: Mapping[str, HostArray], prefix: str) -> dict[str, HostArray]:
    return {name.removeprefix(f"{prefix}."): value for name, value in arrays.items() if name.startswith(f"{prefix}.")}
