"""Copy a run up to a step under another name, as the start of a fork.

Groups, ledger, metrics, evaluations and commit records of the steps before the fork are copied, with the newest
retained checkpoint among them, so that the fork's folder proves them by itself. If the fork begins later than that
checkpoint, its trainer trains the steps between again from the log, as after a crash.

Invariant: the folder gets its name when it is complete; a killed or failed copy leaves only a hidden folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.errors import ConfigError, DecodeError, Unavailable, WeightsError
from shared.files import locks, storage
from shared.run import archive, checkpoint_files, commits, saved
from shared.run import state as states
from shared.run.archive import Archive
from shared.run.commits import CommitRecord
from shared.run.folder import RunFolder
from shared.run.ledger import NONFINITE
from shared.run.lineage import epoch_of, in_lineage
from shared.run.state import OPTIMIZER, TrainerState
from shared.types import WeightVersion
from volley_proof.verify import records, tickets
from volley_python.folder import counted_lines

_NAME = "run.name"
_PREFIXES = ("refused", "demonstrations")
_LINES = ("evals", "samples", "handovers")


@dataclass(frozen=True, slots=True)
class ForkStart:
    """State of `source`, a run's folder, after the step that a fork follows, and the checkpoint to restore for it."""

    source: RunFolder
    run: str
    state: TrainerState
    checkpoint: WeightVersion


def find(source: RunFolder, run: str, step: int, head: TrainerState) -> ForkStart:
    """Find state and checkpoint for a fork after `step`. Raises ConfigError if they are not retained."""
    retained = [v for v in checkpoint_files.versions(source.checkpoints) if in_lineage(v, head.lineage)]
    logged = [v for v in commits.versions(source.archive) if in_lineage(v, head.lineage)]
    state = next(
        filter(None, (_state(source, v) for v in sorted({*retained, *logged}, reverse=True) if v.step == step)), None
    )
    if state is not None:
        usable = [v for v in retained if v <= state.version and in_lineage(v, state.lineage)]
        if usable:
            return ForkStart(source, run, state, usable[-1])
    first = min((v.step for v in retained), default=None)
    there = f"the oldest retained checkpoint is of step {first}" if first is not None else "no checkpoint is retained"
    raise ConfigError(
        f"run {run} cannot be forked from step {step}: {there}",
        "choose a later --from, or remove it to start from the run's first weights; a run with a higher"
        " trainer.checkpointing_options.max_to_keep retains more",
    )


def _state(source: RunFolder, version: WeightVersion) -> TrainerState | None:
    """State of a version; None if it cannot be read."""
    try:
        return commits.read(source.archive, version).state
    except (WeightsError, Unavailable):
        pass
    try:
        return states.read(source.checkpoints / str(version))[0]
    except (WeightsError, Unavailable):
        return None


@contextmanager
def draft(folder: RunFolder) -> Iterator[RunFolder]:
    """Make a hidden folder that gets the name of `folder` if the body succeeds, and is removed otherwise.

    Raises StorageFull, and ConfigError if the folder exists or another process makes it.
    """
    hidden = RunFolder(folder.path.with_name(f".fork-{folder.name}"))
    with storage.storage(folder.path.parent), _creation_lock(hidden.path.with_name(f"{hidden.name}.lock"), folder.path):
        shutil.rmtree(hidden.path, ignore_errors=True)
        try:
            hidden.path.mkdir(parents=True)
            yield hidden
            storage.sync_tree(hidden.path)
            hidden.path.rename(folder.path)
            storage.fsync(folder.path.parent)
        finally:
            shutil.rmtree(hidden.path, ignore_errors=True)


@contextmanager
def _creation_lock(lock: Path, made: Path) -> Iterator[None]:
    """Lock a folder's creation against other processes. Raises ConfigError if one creates it, or has created it."""
    descriptor = locks.lock_file(lock)
    try:
        if not locks.try_lock(descriptor):
            raise ConfigError(f"another process is creating {made}", "wait for it, or choose another run.name=…")
        try:
            if made.exists():
                raise ConfigError(f"another process has created {made}", "choose another run.name=…")
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def copy(found: ForkStart, target: RunFolder, name: str) -> None:
    """Copy the first steps to `target`, for a run `name`. Raises ConfigError, DecodeError, WeightsError, OSError."""
    source, state = found.source, found.state
    _copy_lines(found, target)
    _copy_groups(found, target, name)
    kept = {found.checkpoint, *([WeightVersion.parse(state.reference)] if state.reference else [])}
    for version in sorted(kept):
        _copy_checkpoint(source, target, version, name)
    for version in commits.versions(source.archive):
        if found.checkpoint <= version <= state.version and in_lineage(version, state.lineage):
            record = commits.read(source.archive, version)
            path = commits.path_of(target.archive, version)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(CommitRecord(name, record.checksum, _renamed(record.state, name)).to_json())
    if source.sft.exists():
        shutil.copy(source.sft, target.sft)


def copy_environments(source: RunFolder, target: RunFolder) -> None:
    """Copy what a fork needs from its first step on: environments, their mixture, the model's folder. Raises OSError.

    Claims the epochs of the run, so that those of the fork are later: a version names one origin.
    """
    for path in (source.environments, source.path / "model"):
        if path.is_dir():
            shutil.copytree(path, target.path / path.name, symlinks=True)
    if source.mixture.exists():
        shutil.copy(source.mixture, target.mixture)
    for epoch in archive.epochs(source.archive):
        (target.archive / f"e{epoch:06d}").mkdir(parents=True, exist_ok=True)


def _renamed(state: TrainerState, name: str) -> TrainerState:
    """Return the state as a run of that name records it; its checkpoints.jsonl and fork.json are others."""
    settings = tuple((epoch, {k: name if k == _NAME else v for k, v in flat.items()}) for epoch, flat in state.settings)
    names = RunFolder(Path())
    own = {names.saved.name, names.fork.name}
    files = state.files and {key: value for key, value in state.files.items() if key not in own}
    return replace(state, settings=settings, files=files)


def _copy_lines(found: ForkStart, target: RunFolder) -> None:
    source, state = found.source, found.state
    lines, _ = tickets.read(source.ledger)
    fates = tickets.fates(counted_lines.with_pending(lines, state), state)
    progress, trained = state.progress(), fates.n_trained
    kept = [line for ticket, line in fates.voids.items() if progress.is_finished(ticket) and ticket not in trained]
    _write(target.ledger, [*(line for step in sorted(fates.steps) for line in fates.steps[step]), *kept])
    metrics, _ = records.read(source.metrics, state)
    _write(target.metrics, (metrics[step] for step in sorted(metrics)))
    for name in (*_PREFIXES, *_LINES):
        path: Path = getattr(source, name)
        if path.exists():
            size = state.files.get(path.name, (0, ""))[0]
            (target.path / path.name).write_bytes(_first_bytes(path, size, state, more=name in _LINES))


def _first_bytes(path: Path, size: int, state: TrainerState, *, more: bool) -> bytes:
    """Return the first `size` bytes of a file, and with `more` the later lines about ancestors of the state."""
    text = path.read_bytes()
    made = [text[:size]]
    for line in text[size:].splitlines(keepends=True) if more else ():
        try:
            row = codec.from_record(line, "a line", MAX_LINE_VALUES)
        except DecodeError:
            continue
        made += [line] if list(counted_lines.of_weights([row], state)) else []
    return b"".join(made)


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))


def _copy_groups(found: ForkStart, target: RunFolder, name: str) -> None:
    """Copy the archived groups of the steps, and the refused groups that the copied ledger names."""
    source, state = found.source, found.state
    copy = Archive(target.archive, name)
    for step in range(1, state.step + 1):
        version = WeightVersion(epoch_of(step, state.lineage) or 0, step)
        archive.path_of(target.archive, version).parent.mkdir(parents=True, exist_ok=True)
        copy.write(version, list(archive.read(source.archive, found.run, version)))
    if not _has_refused(target):
        return
    for version, path in archive.refused(source.refused_groups):
        if version.step <= state.step + 1 and version.epoch <= state.epoch:
            place = target.refused_groups / path.relative_to(source.refused_groups)
            place.parent.mkdir(parents=True, exist_ok=True)
            made = Archive(place.parent.parent, name)
            made.write(version, list(archive.read_file(path, found.run, version)))
            archive.path_of(place.parent.parent, version).rename(place)


def _has_refused(target: RunFolder) -> bool:
    lines, _ = tickets.read(target.ledger)
    return any(line.get("disposition") == NONFINITE for line in lines)


def _copy_checkpoint(source: RunFolder, target: RunFolder, version: WeightVersion, name: str) -> None:
    """Copy a checkpoint under another run's name; its arrays are linked. Raises WeightsError if it is damaged."""
    folder, place = source.checkpoints / str(version), target.checkpoints / str(version)
    manifest, state = states.verify(folder)
    place.mkdir(parents=True)
    for part in (checkpoint_files.PARAMS, OPTIMIZER):
        storage.link_tree(folder / part, place / part)
    base = manifest.adapter.base.folder(source.checkpoints) if manifest.adapter else None
    if base is not None and not (place := target.checkpoints / checkpoint_files.BASE / base.name).exists():
        shutil.copytree(base, place)
    place = target.checkpoints / str(version)
    manifest = replace(manifest, run=name, state=None)
    optimizer = states.read(folder)[1]
    text = _renamed(state, name).to_json(optimizer_files=optimizer, seal=checkpoint_files.seal(manifest))
    (place / states.STATE).write_bytes(text)
    checkpoint_files.write_manifest(place, replace(manifest, state=checkpoint_files.digest(place / states.STATE)))
    saved.append(target.checkpoints, version, checkpoint_files.digest(place / checkpoint_files.MANIFEST))
