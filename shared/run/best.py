"""Find the version of a run that solved the most held-out tasks, by evals.jsonl.

A task whose episode failed (infrastructure) counts as not solved, which gives a lower bound of what the version solves.
An evaluation with more than MOST_FAILED of its tasks failed ranks below all others.

Every evaluation measures exactly one version. Records of undone weights do not count. The last record of a version
counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.errors import DecodeError
from shared.files.reading import whole_lines
from shared.run.lineage import in_lineage
from shared.types import WeightVersion

MOST_FAILED = 0.05
"""Share of an evaluation's tasks that may fail before the evaluation counts as incomplete."""

type Standing = tuple[bool, float, int]
"""Rank of an evaluation: complete, lower bound of the share of solved tasks, tasks played if incomplete."""


@dataclass(frozen=True, slots=True)
class MeasuredVersion:
    """Means of an evaluation, over the `n_tasks` - `failed` held-out tasks of the main environment that were played."""

    version: WeightVersion
    success: float
    reward_mean: float
    n_tasks: int
    failed: int

    @property
    def rank(self) -> tuple[Standing, float, WeightVersion]:
        """Order by standing, then `reward_mean`, then version."""
        return standing(self.success, self.n_tasks - self.failed, self.failed), self.reward_mean, self.version


def standing(success: float, played: int, failed: int) -> Standing:
    """Return the standing. Args: success: share of the `played` tasks (at least one); failed: further tasks."""
    is_complete = failed <= MOST_FAILED * (played + failed)
    return is_complete, success * played / (played + failed), 0 if is_complete else played


def best_version(evals: Path, lineage: Sequence[tuple[int, int]], step: int | None = None) -> MeasuredVersion | None:
    """Return the best version; None if none was measured or the file cannot be read.

    Args:
        evals: evals.jsonl.
        lineage, step: of the newest state. Later versions do not count.
    """
    try:
        found = [one for text in whole_lines(evals) if (one := _measured(text)) is not None]
    except OSError:
        return None
    last = {
        one.version: one
        for one in found
        if in_lineage(one.version, lineage) and (step is None or one.version.step <= step)
    }
    return max(last.values(), key=lambda one: one.rank, default=None)


def _measured(text: bytes) -> MeasuredVersion | None:
    try:
        row: Mapping[str, Any] = codec.from_record(text, "a line of evaluations", MAX_LINE_VALUES)
        low, high = (WeightVersion.parse(row[key]) for key in ("version_min", "version_max"))
        success, reward = row["success"], row["reward_mean"]
        n_tasks, failed = row["n_tasks"], row["failed"]
        is_measured = isinstance(success, int | float) and isinstance(reward, int | float) and low.step == high.step
        is_counted = isinstance(n_tasks, int) and isinstance(failed, int) and 0 <= failed < n_tasks
        if row.get("env") is not None or not is_measured or not is_counted:
            return None
        return MeasuredVersion(high, float(success), float(reward), n_tasks, failed)
    except (KeyError, TypeError, AttributeError, DecodeError):
        return None
