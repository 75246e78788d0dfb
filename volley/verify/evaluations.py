"""Verify the lines of evals.jsonl: each names the versions it evaluated, and holds possible results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.errors import DecodeError
from shared.files.reading import whole_lines
from shared.run import counted
from shared.types import WeightVersion
from volley.verify.violation import MOST_OF_A_KIND, Violation, ViolationKind

_COUNTS, _REWARD = ("n_tasks", "failed"), "reward_mean"
_RESULT = (*_COUNTS, "success", _REWARD)


def check(path: Path) -> Iterator[Violation]:
    """Yield lines that no orchestrator writes. It blanks an incomplete line before it appends another."""
    rows = [*_rows(path)]
    versioned = any(_versions(row) for _, row in rows)
    seen, newest, n = dict[tuple[Any, ...], list[Any]](), dict[str, WeightVersion](), 0
    for number, row in rows:
        if (why := _unfit(row, versioned)) is None and row is not None and (versions := _versions(row)):
            version, env = versions[-1], str(row.get("env"))
            result, key = [row.get(name) for name in _RESULT], (env, version)
            if seen.setdefault(key, result) != result and newest[env] > version:
                why = f"another result of {version} after one of {newest[env]}"
            newest[env] = max(version, newest.get(env, version))
        if why is not None:
            n += 1
            yield Violation(ViolationKind.METRICS, f"line {number}: {why}", file=path.name)
            if n >= MOST_OF_A_KIND:
                return


def beyond(path: Path, last: int) -> Iterator[Violation]:
    """Yield lines without versions whose step is missing or after the last one."""
    for number, row in _rows(path):
        if row is not None and not _versions(row):
            step = row.get("step")
            if type(step) is not int or not 0 <= step <= last:
                detail = f"line {number} is of step {str(step)[:20]}, the newest step is {last}"
                yield Violation(ViolationKind.METRICS, detail, file=path.name)


def _unfit(row: Mapping[str, Any] | None, versioned: bool) -> str | None:
    """Reason why no orchestrator writes such a line, or None.

    Args:
        versioned: other lines name versions.
    """
    if row is None:
        return "it is not a JSON object"
    versions, success = _versions(row), row.get("success")
    if versioned and versions == []:
        return "it names no version, other lines do"
    if versions and versions[0].step != versions[-1].step:
        return f"it measured {versions[0]} and {versions[-1]}, which are of different steps"
    if success is not None and (type(success) not in (int, float) or not 0 <= success <= 1):
        return f"its share of successes is {str(success)[:20]}"
    for name in _COUNTS:
        if (n := row.get(name)) is not None and (type(n) is not int or n < 0):
            return f"its {name} is {str(n)[:20]}"
    if type(mean := row.get(_REWARD)) not in (int, float, NoneType):
        return f"its {_REWARD} is {str(mean)[:20]}"
    return None


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """Yield number and object of each line, None for an incomplete one. Other checks report other damage."""
    try:
        for number, text in enumerate(whole_lines(path), start=1):
            try:
                row = codec.from_record(text, "a line", MAX_LINE_VALUES)
                yield number, row if isinstance(row, dict) else None
            except DecodeError:
                if text.strip() and not text.rstrip().endswith(b"}"):
                    yield number, None
    except OSError:
        return


def _versions(row: Mapping[str, Any] | None) -> list[WeightVersion] | None:
    """Versions of a line; None if they cannot be read, which another check reports."""
    try:
        return counted.versions_of(row or {})
    except (DecodeError, TypeError, AttributeError):
        return None
