"""Checkpoints: `{root}/{version}/{params/, optimizer/, state.json, manifest.json}`. How arrays become files is behind a seam.

Invariants:
- a folder is valid if and only if it has a manifest; everything else in it was durable before the manifest was written;
- `params/` is what rollout servers load; `optimizer/` is what only a resume needs (and the float32 parameters, where the
  published ones are rounded), so a resume is bit-exact;
- a folder whose digests differ is passed over, and the next older one is used.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shared import state as states
from shared import telemetry, weights
from shared.errors import WeightsError
from shared.state import OPTIMIZER, TrainerState
from shared.types import WeightVersion
from shared.weights import Leaf, Manifest, Probe

PARAMS = "params"
_MASTER = "master"
_log = telemetry.Log("checkpoint")


class Array(Protocol):
    """Of numpy, or of JAX on its devices."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


type Arrays = Mapping[str, Array]


class ArrayFiles(Protocol):
    """Writes named arrays below a folder that does not exist yet, and reads them back."""

    def write(self, folder: Path, arrays: Arrays) -> None: ...

    def read(self, folder: Path) -> dict[str, np.ndarray]:
        """Raises WeightsError if the folder does not hold arrays."""
        ...


@dataclass(frozen=True, slots=True)
class Contents:
    """`params` as published; `optimizer` by name; `master` are the float32 parameters if `params` are not, else None."""

    params: Arrays
    optimizer: Arrays
    master: Arrays | None
    model: Mapping[str, Any]
    probe: Probe | None


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint in host memory; `params` are float32."""

    folder: Path
    state: TrainerState
    params: Mapping[str, np.ndarray]
    optimizer: Mapping[str, np.ndarray]


class Checkpoints:
    """The checkpoint folders of one run. All methods block.

    Args:
        root: where the version folders are; made if missing.
        max_to_keep: how many versions stay; the reference version stays beside them.
    """

    def __init__(self, root: Path, run: str, max_to_keep: int, arrays: ArrayFiles) -> None:
        self.root, self._run, self._max_to_keep, self._arrays = root.absolute(), run, max_to_keep, arrays
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, state: TrainerState, contents: Contents, base: WeightVersion | None) -> Path:
        """Makes the version `state.version` durable, then removes old ones. Returns its folder."""
        temporary = self.root / f".tmp-{state.version}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        self._arrays.write(temporary / PARAMS, contents.params)
        training = {f"optimizer.{k}": v for k, v in contents.optimizer.items()}
        training |= {f"{_MASTER}.{k}": v for k, v in (contents.master or {}).items()}
        self._arrays.write(temporary / OPTIMIZER, training)
        _write_state(temporary, state)
        tree = tuple(Leaf(k, tuple(v.shape), str(v.dtype)) for k, v in sorted(contents.params.items()))
        manifest = Manifest(
            run=self._run,
            version=str(state.version),
            base_version=None if base is None else str(base),
            step=state.step,
            kind="full",
            path=PARAMS,
            files=weights.digest_files(temporary, PARAMS),
            tree=tree,
            model=contents.model,
            probe=contents.probe,
            created=time.time(),
        )
        return self._install(temporary, manifest, state)

    def relabel(self, restored: Restored, state: TrainerState) -> Path:
        """The restored checkpoint again, as the first version of a new epoch. Files are linked, not copied."""
        temporary = self.root / f".tmp-{state.version}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name in (PARAMS, OPTIMIZER):
            shutil.copytree(restored.folder / name, temporary / name, copy_function=_link_or_copy)
        _write_state(temporary, state)
        old = weights.read_manifest(restored.folder)
        manifest = replace(old, version=str(state.version), base_version=old.version, created=time.time())
        return self._install(temporary, manifest, state)

    def newest(self) -> Restored | None:
        """The newest checkpoint that is whole, or None if there is none at all.

        Raises WeightsError if there are checkpoints, but not one of them is whole.
        """
        found = weights.versions(self.root)
        for version in reversed(found):
            try:
                return restore(self.root / str(version), self._arrays)
            except (WeightsError, OSError) as error:
                _log.error("checkpoint passed over", version=str(version), reason=str(error))
        if found:
            raise WeightsError(
                f"none of the {len(found)} checkpoints in {self.root} is whole", "restore one, or start a run with another name"
            )
        return None

    def params_of(self, version: str) -> Mapping[str, np.ndarray]:
        """The float32 parameters of a version, exact where the published ones are rounded. Raises WeightsError."""
        return restore(self.root / version, self._arrays).params

    def _install(self, temporary: Path, manifest: Manifest, state: TrainerState) -> Path:
        manifest = replace(manifest, state=weights.digest(temporary / states.STATE))
        _sync_tree(temporary)
        folder = self.root / manifest.version
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        weights.fsync(self.root)
        weights.write_manifest(folder, manifest)
        self._retain(state)
        return folder

    def _retain(self, state: TrainerState) -> None:
        """The manifest goes first: a half-removed folder is not a checkpoint."""
        for version in weights.versions(self.root)[: -self._max_to_keep]:
            if str(version) != state.reference:
                (self.root / str(version) / weights.MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(self.root / str(version), ignore_errors=True)


def restore(folder: Path, arrays: ArrayFiles) -> Restored:
    """Reads a checkpoint and changes nothing. Raises WeightsError if it is not whole."""
    _, state = states.verify(folder)
    training = arrays.read(folder / OPTIMIZER)
    master = _below(training, _MASTER)
    return Restored(folder, state, master or arrays.read(folder / PARAMS), _below(training, "optimizer"))


def _write_state(folder: Path, state: TrainerState) -> None:
    files = weights.digest_files(folder, OPTIMIZER)
    (folder / states.STATE).write_bytes(state.to_json(optimizer_files=files))


def _below(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{prefix}."): value for name, value in arrays.items() if name.startswith(f"{prefix}.")}


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        weights.fsync(path)
    weights.fsync(folder)
