"""Environments whose tasks are the lines of JSONL files: one file a split, one JSON object a line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from services.env.environments.base import EVAL, TRAIN, check_task
from shared.errors import ConfigError
from shared.run.weights import digest

_expected = dict[Path, str]()


def expect(digests: Mapping[str, str]) -> None:
    """From now on this process reads a file of `digests` (blake3 in hex, by path) only if it has that digest."""
    _expected.update({Path(path): found for path, found in digests.items()})


def _check(path: Path) -> None:
    """Raises ConfigError, OSError."""
    wanted = _expected.get(path.absolute())
    if wanted is not None and (found := digest(path)) != wanted:
        raise ConfigError(
            f"data file {path} has changed: its digest is {found[:16]}, it was {wanted[:16]} when the service started",
            "put the file back as it was, or start a new run",
        )


def files_of_splits(train: Path | None, evaluation: Path | None) -> dict[str, Path]:
    """The file of each split that has one."""
    return {split: path for split, path in ((TRAIN, train), (EVAL, evaluation)) if path is not None}


def read_rows[P](path: Path, parse: Callable[[Mapping[str, Any], str], P], *, noun: str, hint: str) -> tuple[P, ...]:
    """Every line of `path` that is not empty, as `parse` makes it of the line's object (an empty one, if the line is
    something else) and of where it stands, FILE:LINE.

    Args: noun: what the lines are, in the plural; hint: which settings name the file. Raises ConfigError naming the
    file, and the line if one is not JSON.
    """
    try:
        _check(path)
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"data file {path}: {error.strerror}", hint) from error
    rows = tuple(parse(_object(line, f"{path}:{n}"), f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip())
    if not rows:
        raise ConfigError(f"data file {path} holds no {noun}")
    return rows


class ProblemFiles[P]:
    """The tasks of an environment that reads one file a split; a split without a file does not exist.

    Files are read at the first use of a split. Everything but `__init__` raises ConfigError if there is none, or one is
    missing or malformed.

    Args:
        name: the environment's, for messages.
        files: by split.
        read: file → problems; raises ConfigError.
        text: problem → what its task's id is a digest of.
        hint: what to set where there are no files.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, Path],
        read: Callable[[Path], tuple[P, ...]],
        text: Callable[[P], str],
        hint: str,
    ) -> None:
        self._name, self._files, self._read, self._text, self._hint = name, files, read, text, hint

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._problems)

    def num_tasks(self, split: str) -> int:
        self._check(split, 0)
        return len(self._problems[split])

    def task(self, split: str, index: int) -> str:
        of_text = hashlib.blake2b(self._text(self.problem(split, index)).encode(), digest_size=6).hexdigest()
        return f"{split}/{index}@{of_text}"

    def problem(self, split: str, index: int) -> P:
        """Raises NotFound."""
        self._check(split, index)
        return self._problems[split][index]

    @cached_property
    def _problems(self) -> dict[str, tuple[P, ...]]:
        if not self._files:
            raise ConfigError(f"{self._name} has no data", self._hint)
        return {split: self._read(path) for split, path in self._files.items()}

    def _check(self, split: str, index: int) -> None:
        check_task(self._name, {name: len(problems) for name, problems in self._problems.items()}, split, index)


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    return row if isinstance(row, dict) else {}
