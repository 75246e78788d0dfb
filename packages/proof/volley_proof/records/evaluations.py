"""Validity of lines of evals.jsonl: each names the versions it evaluated, with possible results.

The proof reports invalid lines, and the trainer refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.errors import DecodeError
from shared.run import counted
from shared.run.data import Digests
from shared.types import WeightVersion

_COUNTS, _REWARD = ("n_tasks", "failed"), "reward_mean"
_RESULT = (*_COUNTS, "success", _REWARD)
_MOST = 100


def invalid_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    """Yield number and fault of each invalid line, at most a hundred.

    The orchestrator blanks an incomplete line before it appends another.
    """
    rows = [*_rows(lines)]
    versioned = any(_versions(row) for _, row in rows)
    seen, newest, n = dict[tuple[Any, ...], list[Any]](), dict[str, WeightVersion](), 0
    for number, row in rows:
        if (why := _fault(row, versioned)) is None and row is not None and (versions := _versions(row)):
            version, env = versions[-1], str(row.get("env"))
            result, key = [row.get(name) for name in _RESULT], (env, version)
            if seen.setdefault(key, result) != result and newest[env] > version:
                why = f"another result of {version} after one of {newest[env]}"
            newest[env] = max(version, newest.get(env, version))
        if why is not None:
            n += 1
            yield number, why
            if n >= _MOST:
                return


def lines_after(lines: Iterable[bytes], last: int) -> Iterator[tuple[int, str]]:
    """Yield number and fault of lines without versions whose step is missing or too high."""
    for number, row in _rows(lines):
        if row is not None and not _versions(row):
            step = row.get("step")
            if type(step) is not int or not 0 <= step <= last:
                yield number, f"it is of step {str(step)[:20]}, the newest step is {last}"


def measured(lines: Iterable[bytes], main: str) -> Iterator[tuple[int, int | None, str, Digests]]:
    """Yield number, step, environment and digests of the data of each evaluation that has some.

    Args:
        main: the run's main environment, which its evaluations do not name.
    """
    for number, row in _rows(lines):
        data = None if row is None else row.get("data")
        if row is not None and isinstance(data, dict) and all(isinstance(one, str) for one in data.values()):
            step = row.get("step")
            yield number, step if isinstance(step, int) else None, str(row.get("env") or main), data


def _fault(row: Mapping[str, Any] | None, versioned: bool) -> str | None:
    """Return why a line is invalid; None if it is valid.

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


def _rows(lines: Iterable[bytes]) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """Yield number and object of each line, None for an incomplete one. Other checks report other damage."""
    for number, text in enumerate(lines, start=1):
        try:
            row = codec.from_record(text, "a line", MAX_LINE_VALUES)
            yield number, row if isinstance(row, dict) else None
        except DecodeError:
            if text.strip() and not text.rstrip().endswith(b"}"):
                yield number, None


def _versions(row: Mapping[str, Any] | None) -> list[WeightVersion] | None:
    """Versions of a line; None if they cannot be read, which another check reports."""
    try:
        return counted.versions_of(row or {})
    except (DecodeError, TypeError, AttributeError):
        return None
