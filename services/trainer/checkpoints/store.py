"""Checkpoints: `{root}/{version}/{params/, optimizer/, state.json, manifest.json}`. How arrays become files is behind a
seam.

Invariants:
- a folder has its name if and only if it is whole: it is made under another name, its manifest last, and renamed when
  durable;
- once `fence` has returned, no trainer of an earlier epoch gives a folder its name: drafts are made in the folder of
  their epoch, which `fence` makes for its own epoch and takes away from all earlier ones;
- `params/` is what rollout servers load; `optimizer/` is what only a resume needs (and the float32 parameters, where
  the published ones are rounded), so a resume is bit-exact;
- with adapters `params/` holds these alone, and the weights that they are of lie once, in
  `{root}/base/{digest}/params/`, durable before the first checkpoint that names them;
- a folder whose digests differ, or whose steps a later trainer undid, is never restored: the next older one is used,
  and once all older trainers are fenced the damaged one is set aside as `{root}/bad/{version}`.
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

from services.trainer.checkpoints.logged import check_log
from services.trainer.models.arrays import (
    Array,
    ArrayFiles,
    Arrays,
    CheckpointContents,
    HostArray,
    RestoredCheckpoint,
)
from shared.errors import ConfigError, Forbidden, Unavailable, WeightsError
from shared.files import storage
from shared.models.origin import Origin
from shared.process import telemetry
from shared.run import archive, checkpoint_files, commits, saved
from shared.run import state as states
from shared.run.best import best_version
from shared.run.checkpoint_files import BAD, Adapter, BaseWeights, Manifest, ManifestFile, ManifestLeaf
from shared.run.folder import RunFolder
from shared.run.state import OPTIMIZER, TrainerState
from shared.types import WeightVersion

PARAMS = "params"
_MASTER = "master"
_DRAFT = ".tmp-"
_log = telemetry.Log("checkpoint")


class CheckpointFolders:
    """The checkpoint folders of one run. All methods block.

    Args:
        root: where the version folders are; made if missing.
        max_to_keep: how many steps stay; beside them the reference version, and the one that solved the most
            held-out tasks.

    `bad` are the versions that `newest` found damaged, with the reason.
    """

    def __init__(self, root: Path, run: str, max_to_keep: int, arrays: ArrayFiles) -> None:
        self.root, self._run, self._max_to_keep, self._arrays = root.absolute(), run, max_to_keep, arrays
        self.bad: dict[str, str] = {}
        self.root.mkdir(parents=True, exist_ok=True)

    def newest(self) -> RestoredCheckpoint | None:
        """The newest checkpoint that is whole and not undone, or None if there is none at all. Changes nothing.

        Raises WeightsError if there are checkpoints, but none to go on from, ConfigError if one is of another run, and
        Unavailable if one cannot be read now: that is no damage, and nothing durable is undone for it.
        """
        for version in reversed(self._candidates()):
            try:
                return self._restore(version)
            except (WeightsError, Forbidden) as error:
                if (self.root / str(version)).exists():  # else another trainer has removed it
                    self.bad[str(version)] = str(error)
                    _log.error("checkpoint passed over", version=str(version), reason=str(error))
        if n := len(checkpoint_files.versions(self.root)):
            raise WeightsError(
                f"none of the {n} checkpoints in {self.root} is whole", "restore one, or start a run with another name"
            )
        return None

    def head(self) -> WeightVersion | None:
        """The version of the newest checkpoint there is now, those left out that `newest` passed over."""
        return next(reversed(self._candidates()), None)

    def oldest_step(self) -> int:
        """Of the newest checkpoints that are retained: what the log says of earlier steps, nobody needs to go on."""
        retained = _retained(checkpoint_files.versions(self.root), self._max_to_keep)
        return min((version.step for version in retained), default=0)

    def metrics(self) -> list[Mapping[str, Any]]:
        """The lines of metrics that any retained checkpoint carries, the newest checkpoint's first."""
        lines: list[Mapping[str, Any]] = []
        for version in reversed(self._candidates()):
            with suppress(WeightsError, Unavailable):  # damaged, or removed by another trainer
                lines += states.read(self.root / str(version))[0].metrics
        return lines

    def fence(self, epoch: int) -> None:
        """Opens the folder that drafts of `epoch`, which is claimed, are made in, and removes those of earlier epochs,
        with what crashes left there. Whoever still makes a checkpoint there ends with Fenced. Raises StorageFull.
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
        """Sets damaged checkpoints aside, and names those that checkpoints.jsonl does not; earlier trainers are fenced
        by now. Raises StorageFull.
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
        """Makes the version `state.version` durable, then removes old ones. Returns its folder.

        Raises StorageFull, WeightsError if its state is more than a reader takes, and Fenced if a later epoch has
        called `fence`, or its own has not; then nothing of it is there.
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
        """Makes what the adapters of a run are of durable, before `version`, the first of them. Raises as `save`."""
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
        """The restored checkpoint again, as the first version of a new epoch. Files are linked, not copied, and their
        digests are those that were verified when it was restored. Raises as `save`.
        """
        with self._draft(state.version) as draft:
            with storage.held(draft):
                for name in (PARAMS, OPTIMIZER):
                    storage.link_tree(restored.folder / name, draft / name)
            old = checkpoint_files.read_manifest(restored.folder)
            manifest = replace(old, version=str(state.version), base_version=old.version, created=time.time())
            return self._install(draft, manifest, states.read(restored.folder)[1], state)

    def restored(self, version: WeightVersion) -> RestoredCheckpoint:
        """A checkpoint with optimizer and all. Raises WeightsError, and Unavailable if it cannot be read now."""
        return restore(self.root / str(version), self._arrays)

    def params_of(self, version: str) -> Mapping[str, HostArray]:
        """The float32 parameters of a version, exact where the published ones are rounded. Raises WeightsError."""
        return restore(self.root / version, self._arrays).params

    def base_of(self, restored: RestoredCheckpoint) -> dict[str, HostArray]:
        """What the adapters of a checkpoint of any run are of; empty if it has none. Raises as `read_base`."""
        return read_base(restored.folder.parent, restored.adapter, self._arrays) if restored.adapter else {}

    def foreign(self, origin: Origin) -> RestoredCheckpoint:
        """A checkpoint of another run, to start from. Raises ConfigError if it is not whole, or not the one it was."""
        try:
            if checkpoint_files.digest(origin.checkpoint / checkpoint_files.MANIFEST) != origin.manifest:
                raise WeightsError("its manifest is another one than when the run was begun")
            found = restore(origin.checkpoint, self._arrays)
            check_log(origin.checkpoint, self._arrays)
            return found
        except (WeightsError, Forbidden, OSError) as error:
            there = ", ".join(map(str, checkpoint_files.versions(origin.checkpoint.parent))) or "none"
            raise ConfigError(
                f"model.path={origin.path} cannot be used: {error}",
                f"choose another version of run {origin.run}: retained are {there}",
            ) from error

    def _candidates(self) -> list[WeightVersion]:
        """Oldest first."""
        found = set(checkpoint_files.versions(self.root))
        logged = commits.versions(RunFolder(self.root.parent).archive)
        return [v for v in states.surviving(sorted({*found, *logged})) if v in found and str(v) not in self.bad]

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
        """A folder for a checkpoint in the making, which is gone at the end unless it was renamed."""
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
        """Makes the folder of checkpoints again if somebody removed it: the weights are in memory. Not for a trainer
        that was replaced.
        """
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
        """Nothing goes once a newer trainer has begun: it may need what we would remove."""
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
        """A trainer that ended before its first checkpoint leaves the base of it."""
        bases = list((self.root / checkpoint_files.BASE).glob("*"))
        if len(bases) > 1:
            adapter = checkpoint_files.read_manifest(self.root / str(version)).adapter
            for base in bases:
                if adapter is None or base.name != adapter.base.digest:
                    shutil.rmtree(base, ignore_errors=True)

    def _remove(self, name: str) -> None:
        """Renamed first: a half-removed folder is not a checkpoint, and whoever still writes into a draft misses it
        whole.
        """
        away = self.root / f"{_DRAFT}removed-{name}-{os.getpid()}"
        with suppress(FileNotFoundError):
            (self.root / name).rename(away)
        shutil.rmtree(away, ignore_errors=True)


def restore(folder: Path, arrays: ArrayFiles) -> RestoredCheckpoint:
    """Reads a checkpoint and changes nothing.

    Raises WeightsError if it is not whole, or not what its folder's name says, and Unavailable if it cannot be read
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
                "a step that gave such numbers was saved; older ones may be whole",
            )
    return found


def opened(folder: Path, arrays: ArrayFiles) -> RestoredCheckpoint:
    """A checkpoint that was verified. Raises WeightsError, and Unavailable if it cannot be read now."""
    manifest, (state, _) = checkpoint_files.read_manifest(folder), states.read(folder)
    try:
        training = arrays.read(folder / OPTIMIZER)
        params = _below(training, _MASTER) or arrays.read(folder / PARAMS)
    except OSError as error:
        raise checkpoint_files.unreadable(str(folder), error) from error
    return RestoredCheckpoint(folder, state, params, _below(training, "optimizer"), manifest.adapter)


def training_arrays(contents: CheckpointContents) -> dict[str, Array]:
    """What only a resume needs, as it is stored."""
    training = {f"optimizer.{k}": v for k, v in contents.optimizer.items()}
    return training | {f"{_MASTER}.{k}": v for k, v in (contents.master or {}).items()}


def read_base(root: Path, adapter: Adapter, arrays: ArrayFiles) -> dict[str, HostArray]:
    """What adapters below `root` are of, in the dtype it is published in. Raises WeightsError, and Unavailable if it
    cannot be read now.
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
    """The `n` newest, and one of each of the `n` newest steps: restarts without progress do not use up what can be gone
    back to.
    """
    alive = states.surviving(found)
    of_step = {version.step: version for version in alive}
    return {*alive[-n:], *(of_step[step] for step in sorted(of_step)[-n:])}


def _drafts(epoch: int) -> str:
    return f"{_DRAFT}e{epoch:06d}"


def _epoch_of(drafts: str) -> int:
    """0 for what is being removed."""
    digits = drafts.removeprefix(f"{_DRAFT}e")
    return int(digits) if digits.isdecimal() else 0


def _below(arrays: Mapping[str, HostArray], prefix: str) -> dict[str, HostArray]:
    return {name.removeprefix(f"{prefix}."): value for name, value in arrays.items() if name.startswith(f"{prefix}.")}
