"""Environments whose tasks are the rows of data files, one file per split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from services.env.episode_types import EVAL, TRAIN, check_task
from shared.errors import ConfigError
from shared.run.checkpoint_files import digest
from volley_data.data_files import rows

_expected = dict[Path, str]()


def expect(digests: Mapping[str, str]) -> None:
    """Set expected digests (blake3 in hex, by path); other content is not read."""
    _expected.update({Path(path): found for path, found in digests.items()})


def _check(path: Path, hint: str) -> None:
    """Compare a file with its expected digest. Raises ConfigError."""
    wanted = _expected.get(path.absolute())
    try:
        found = None if wanted is None else digest(path)
    except OSError as error:
        raise ConfigError(f"data file {path}: {error.strerror}", hint) from error
    if wanted is not None and found is not None and found != wanted:
        raise ConfigError(
            f"data file {path} has changed: its digest is {found[:16]}, it was {wanted[:16]} when the service started",
            "restore the file, or start a new run",
        )


def files_of_splits(train: Path | None, evaluation: Path | None) -> dict[str, Path]:
    """File of each split that has one."""
    return {split: path for split, path in ((TRAIN, train), (EVAL, evaluation)) if path is not None}


def read_rows[P](path: Path, parse: Callable[[Mapping[str, Any], str], P], *, noun: str, hint: str) -> tuple[P, ...]:
    """Parse every row of `path` (see volley_data.data_files) from its object and its place.

    A row that is not an object is parsed as an empty one.

    Args:
        noun: name of the rows, in the plural.
        hint: settings that name the file.

    Raises ConfigError naming the file, and the row if one cannot be read.
    """
    _check(path, hint)
    found = tuple(parse(row if isinstance(row, dict) else {}, place) for place, row in rows(path, hint))
    if not found:
        raise ConfigError(f"data file {path} has no {noun}", "check that the file is complete")
    return found


class ProblemFiles[P]:
    """Tasks of an environment that reads one file per split; a split without a file does not exist.

    Files are read at the first use of a split. Everything except `__init__` raises ConfigError if there is none, or one
    is missing or malformed.

    Args:
        name: name of the environment, for messages.
        files: files by split.
        read: file → problems; raises ConfigError.
        text: problem → text whose digest is in the task's id.
        hint: settings to make if there are no files.
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
        """The problem of a task. Raises NotFound."""
        self._check(split, index)
        return self._problems[split][index]

    @cached_property
    def _problems(self) -> dict[str, tuple[P, ...]]:
        if not self._files:
            raise ConfigError(f"{self._name} has no data", self._hint)
        return {split: self._read(path) for split, path in self._files.items()}

    def _check(self, split: str, index: int) -> None:
        check_task(self._name, {name: len(problems) for name, problems in self._problems.items()}, split, index)
