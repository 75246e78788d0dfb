"""The files that states hold the beginnings of (see shared.run.held), and that every checkpoint has its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import blake3
import orjson

from services.cli.verify.checkpoints import RetainedCheckpoint
from services.cli.verify.violation import Violation, ViolationKind
from shared.files.reading import MAX_RECORD_BYTES, ended_lines, open_file
from shared.run import held, saved
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.types import WeightVersion

_BLOCK_BYTES = 2**20
type Expected = Mapping[int, Mapping[str, WeightVersion]]
"""By size of the beginning: the digests of it, each with the oldest version whose state says so."""


def check(
    folder: RunFolder, ancestors: Sequence[TrainerState], found: Sequence[RetainedCheckpoint]
) -> Iterator[Violation]:
    """All files by the states of the newest epoch, which begins with them as it found them; evaluations and samples
    also by those of earlier epochs, as far as the file only grew since.
    """
    epoch = ancestors[-1].epoch
    expected = dict[str, dict[int, dict[str, WeightVersion]]]()
    for state in ancestors:
        for name, (size, digest) in (state.files or {}).items() if state.epoch == epoch else ():
            expected.setdefault(name, {}).setdefault(size, {}).setdefault(digest, state.version)
    known = {path.name: path for path in held.files(folder)}
    for path in (folder.evals, folder.samples):
        older = [state for state in _grown(path.name, ancestors) if state.epoch < epoch]
        yield from _rewritten(path, older)
    for name, sizes in expected.items():
        if name in known:
            yield from _beginnings(known[name], sizes)
        else:
            yield Violation(
                ViolationKind.STATE, f"it holds {name[:100]}, which is no file of a run", step=ancestors[-1].step
            )
    yield from _lines(folder, found)


def absent(found: Sequence[RetainedCheckpoint]) -> list[str]:
    """Checks that older trainers left no witness for."""
    old = [str(one.version) for one in found if one.state.files is None]
    return [f"checkpoints.jsonl does not name {', '.join(old)}: an older version made them"] if old else []


def replaced(folder: RunFolder, ancestors: Sequence[TrainerState]) -> list[str]:
    """Files that were removed or replaced by shorter ones: what older states hold of them cannot be compared."""
    return [
        f"{path.name} before {grown[0].version}: it has lost lines since"
        for path in (folder.evals, folder.samples)
        if (grown := _grown(path.name, ancestors)) and grown[0] is not _with_files(ancestors)[0]
        if any(path.name in (state.files or {}) for state in ancestors if state.version < grown[0].version)
    ]


def _with_files(ancestors: Sequence[TrainerState]) -> list[TrainerState]:
    return [state for state in ancestors if state.files is not None]


def _grown(name: str, ancestors: Sequence[TrainerState]) -> list[TrainerState]:
    """The newest states of which each holds no less of the file than the one before, oldest first."""
    found, size = list[TrainerState](), MAX_RECORD_BYTES
    for state in reversed(_with_files(ancestors)):
        held_bytes = (state.files or {}).get(name, (0, ""))[0]
        if held_bytes > size:
            break
        found.append(state)
        size = held_bytes
    return found[::-1]


def _rewritten(path: Path, older: Sequence[TrainerState]) -> Iterator[Violation]:
    """A file that was removed may have grown as long again by the evaluations of one step: more than that tells that
    somebody has rewritten it.
    """
    expected = dict[int, dict[str, WeightVersion]]()
    for state in older:
        if (one := (state.files or {}).get(path.name)) is not None:
            expected.setdefault(one[0], {}).setdefault(one[1], state.version)
    for violation in _beginnings(path, expected) if expected else ():
        try:
            with open_file(path) as file:
                steps = {_step(line) for _, line in ended_lines(file)}
        except OSError:
            steps = set[int | None]()
        if len(steps - {None}) > 1:
            yield violation


def _step(line: bytes) -> int | None:
    try:
        step = orjson.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def _beginnings(path: Path, sizes: Expected) -> Iterator[Violation]:
    told, at = blake3.blake3(), 0
    try:
        with open_file(path) as file:
            for size in sorted(sizes):
                while at < size and (block := file.read(min(_BLOCK_BYTES, size - at))):
                    told.update(block)
                    at += len(block)
                for digest, version in sizes[size].items():
                    if at < size or told.hexdigest() != digest:
                        yield _of(path, f"its first {size} bytes are not those that {version} was made after", version)
                        return
    except OSError as error:
        version = next(iter(sizes[min(sizes)].values()))
        yield _of(path, f"{version} was made after lines of it, and it cannot be read: {error.strerror}", version)


def _lines(folder: RunFolder, found: Sequence[RetainedCheckpoint]) -> Iterator[Violation]:
    """A checkpoint that is made where there is such a file has its line before its name."""
    try:
        named = saved.named(folder)
    except OSError:
        return  # `saved.check` has named it
    for one in found:
        if one.state.files is not None and one.version not in named:
            detail = f"{folder.saved.name} does not name {one.version}"
            yield Violation(ViolationKind.CHECKPOINT, detail, step=one.version.step, file=folder.saved.name)


def _of(path: Path, detail: str, version: WeightVersion) -> Violation:
    return Violation(ViolationKind.CHAIN, detail, step=version.step, file=path.name)
