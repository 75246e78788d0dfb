"""Verify recorded losses of lines: older states must still agree with the file.

After a loss, a file holds what was left of it, new lines, and perhaps all of the old lines: an orchestrator that has
them hands them over again, in their order. So its lines about earlier steps are a beginning of what older states hold,
and if some came back, all did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import blake3
import orjson

from shared.files.reading import ended_lines, open_file
from shared.run.state import TrainerState
from volley_proof.verify.violation import Violation, ViolationKind

type Numbered = tuple[int, int | None, bytes]
"""End in the file, step if it names one, and bytes of a line with its newline."""


def check(path: Path, states: Sequence[TrainerState], names_steps: bool) -> Iterator[Violation]:
    """Check the losses of one file along the lineage.

    Args:
        states: those that hold files, oldest first.
        names_steps: lines of the file name the step that they are about.
    """
    counted = [(a, b) for a, b in pairwise(states) if n_losses(b, path.name) > n_losses(a, path.name)]
    for before, after in counted:
        if _is_next(before, after) and size_of(after, path.name) >= size_of(before, path.name):
            detail = f"{after.version} counts lost lines, but has no fewer bytes than {before.version}"
            yield Violation(ViolationKind.CHAIN, detail, step=after.step, file=path.name)
    if counted and names_steps:
        before, after = counted[-1]
        older = [one for one in states if one.version <= before.version and _is_alike(one, before, path.name)]
        if (detail := _old_lines(path, older, size_of(after, path.name))) is not None:
            yield Violation(ViolationKind.CHAIN, detail, step=after.step, file=path.name)


def size_of(state: TrainerState, name: str) -> int:
    return state.files.get(name, (0, ""))[0]


def n_losses(state: TrainerState, name: str) -> int:
    return state.losses.get(name, 0)


def step_of(line: bytes) -> int | None:
    """Step that a line names; None without one."""
    try:
        step = orjson.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


def _is_next(before: TrainerState, after: TrainerState) -> bool:
    """Return True if no state between the two is missing."""
    if after.epoch == before.epoch:
        return after.step == before.step + 1
    return after.step == before.step and after.lineage[:-1] == before.lineage


def _is_alike(one: TrainerState, before: TrainerState, name: str) -> bool:
    return n_losses(one, name) == n_losses(before, name)


def _old_lines(path: Path, older: Sequence[TrainerState], left: int) -> str | None:
    """Return how lines about earlier steps contradict the states before the loss, or None.

    Lines of a single step may be an evaluation that ended after the loss. If no line came back, one of the newest step
    stands where lost lines were.

    Args:
        left: bytes that the state after the loss holds.
    """
    before = older[-1]
    lines = _read(path)

    def lines_of(fits: Callable[[int], bool]) -> list[Numbered]:
        return [one for one in lines if one[1] is not None and fits(one[1])]

    old = lines_of(lambda step: step < before.step)
    if len({step for _, step, _ in old}) < 2:
        return None
    came_back = old[-1][0] > left
    known = [one for one in lines_of(lambda step: step <= before.step) if came_back or one[0] <= left]
    texts = [b"".join(text for _, _, text in found) for found in (old, known)]
    for state in older:
        size, digest = state.files.get(path.name, (0, ""))
        whole = [text[:size] for text in texts if len(text) >= size > 0]
        if whole and all(blake3.blake3(text).hexdigest() != digest for text in whole):
            return f"its lines about steps before {before.step} differ from those recorded by {state.version}"
    if came_back and max(map(len, texts)) < size_of(before, path.name):
        return f"lines about steps before {before.step} came back after a loss, but not all that {before.version} holds"
    return None


def _read(path: Path) -> list[Numbered]:
    found, end = list[Numbered](), 0
    try:
        with open_file(path) as file:
            for size, line in ended_lines(file):
                end += size
                found.append((end, step_of(line), line + b"\n"))
    except OSError:
        return []
    return found
