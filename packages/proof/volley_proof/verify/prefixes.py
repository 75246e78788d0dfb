"""Verify files by the digests of their first bytes that states hold.

See shared.run.protected_files. Also checks that checkpoints.jsonl names each checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import blake3

from shared.files.reading import ended_lines, open_file
from shared.run import protected_files, saved
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.types import WeightVersion
from volley_proof.verify import losses
from volley_proof.verify.checkpoints import RetainedCheckpoint
from volley_proof.verify.losses import n_losses, size_of, step_of
from volley_proof.verify.violation import Violation, ViolationKind

_BLOCK_BYTES = 2**20
_NAMES = RunFolder(Path())
_REWRITTEN = (_NAMES.evals.name, _NAMES.samples.name)
"""Files that the orchestrator makes again if they are removed during the run."""
_PROTECTED_NAMES = tuple(path.name for path in protected_files.files(_NAMES))
type Expected = Mapping[int, Mapping[str, WeightVersion]]
"""By number of first bytes: their digests, each with the oldest version whose state holds it."""


def check(
    folder: RunFolder, ancestors: Sequence[TrainerState], found: Sequence[RetainedCheckpoint]
) -> Iterator[Violation]:
    """Check each file by the newest states that hold ever more bytes of it.

    Also yields states that hold fewer bytes than the one before, although no trainer recorded lost lines.
    """
    states, newest = ancestors, ancestors[-1]
    known = {path.name: path for path in protected_files.files(folder)}
    for name, path in known.items():
        grown = _grown(name, states)
        recent = [state for state in grown if state.epoch == newest.epoch or name not in _REWRITTEN]
        yield from _prefix_violations(path, _expected(name, recent))
        if name in _REWRITTEN:
            yield from _rewritten(path, [state for state in grown if state.epoch < newest.epoch])
        for before, after in pairwise(states):
            if size_of(after, name) < size_of(before, name) and n_losses(after, name) <= n_losses(before, name):
                now, was = size_of(after, name), size_of(before, name)
                detail = f"{after.version} holds {now} bytes of it, {before.version} {was}"
                yield _of(path, f"{detail}, and no trainer recorded lost lines", after.version)
        yield from losses.check(path, states, names_steps=name == _NAMES.evals.name)
    for name in {name for state in states if state.epoch == newest.epoch for name in state.files} - known.keys():
        detail = f"it holds {name[:100]}, which is not a file of a run"
        yield Violation(ViolationKind.STATE, detail, step=newest.step)
    yield from _lines(folder, found)


def replaced(folder: RunFolder, states: Sequence[TrainerState]) -> list[str]:
    """Files that were removed, became shorter or were rewritten: digests of older states cannot be compared, or are
    gone.
    """
    counts = states[-1].losses
    found = {
        path.name: f"{path.name} before {grown[0].version}: it has lost lines since"
        for path in protected_files.files(folder)
        if (grown := _grown(path.name, states)) and grown[0] is not states[0]
        if any(path.name in state.files for state in states if state.version < grown[0].version)
    }
    for name in _PROTECTED_NAMES:
        if n := counts.get(name, 0):
            found.setdefault(name, f"{name}: it has lost lines, {n} times by what trainers found")
    violations = [
        f"{name}: it was rewritten, {n} times by what trainers found"
        for name in _PROTECTED_NAMES
        if (n := counts.get(protected_files.REWRITTEN + name, 0))
    ]
    return [*found.values(), *violations]


def _grown(name: str, states: Sequence[TrainerState]) -> list[TrainerState]:
    """The newest states that hold ever more bytes of the file, oldest first."""
    found = list(states[-1:])
    for before in reversed(states[:-1]):
        after = found[-1]
        if size_of(before, name) > size_of(after, name) or n_losses(before, name) != n_losses(after, name):
            break
        found.append(before)
    return found[::-1]


def _expected(name: str, states: Sequence[TrainerState]) -> Expected:
    expected = dict[int, dict[str, WeightVersion]]()
    for state in states:
        if (one := state.files.get(name)) is not None:
            expected.setdefault(one[0], {}).setdefault(one[1], state.version)
    return expected


def _rewritten(path: Path, older: Sequence[TrainerState]) -> Iterator[Violation]:
    """Violations of a file that the orchestrator may have made again.

    After a removal, the evaluations of one step may make it as long again. Lines of several steps show that it was
    rewritten.
    """
    for violation in _prefix_violations(path, _expected(path.name, older)):
        try:
            with open_file(path) as file:
                steps = {step_of(line) for _, line in ended_lines(file)}
        except OSError:
            steps = set[int | None]()
        if len(steps - {None}) > 1:
            yield violation


def _prefix_violations(path: Path, sizes: Expected) -> Iterator[Violation]:
    if not sizes:
        return
    hasher, at = blake3.blake3(), 0
    try:
        with open_file(path) as file:
            for size in sorted(sizes):
                while at < size and (block := file.read(min(_BLOCK_BYTES, size - at))):
                    hasher.update(block)
                    at += len(block)
                for digest, version in sizes[size].items():
                    if at < size or hasher.hexdigest() != digest:
                        yield _of(path, f"its first {size} bytes differ from those recorded by {version}", version)
                        return
    except OSError as error:
        version = next(iter(sizes[min(sizes)].values()))
        yield _of(path, f"{version} has a digest of it, but it cannot be read: {error.strerror}", version)


def _lines(folder: RunFolder, found: Sequence[RetainedCheckpoint]) -> Iterator[Violation]:
    """Yield checkpoints without a line in checkpoints.jsonl, which is written before a checkpoint gets its name."""
    try:
        named = saved.named(folder)
    except OSError:
        return  # `saved.check` has named it
    for one in found:
        if one.version not in named:
            detail = f"{folder.saved.name} does not name {one.version}"
            yield Violation(ViolationKind.CHECKPOINT, detail, step=one.version.step, file=folder.saved.name)


def _of(path: Path, detail: str, version: WeightVersion) -> Violation:
    return Violation(ViolationKind.CHAIN, detail, step=version.step, file=path.name)
