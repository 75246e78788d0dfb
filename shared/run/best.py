"""The version of a run that solved the most held-out tasks, by evals.jsonl.

A task whose episode failed (infrastructure) counts as not solved: nothing is known of it, so this is the least that the
version can have solved. An evaluation with more than MOST_FAILED of its tasks failed comes after every other one.

Every evaluation measures exactly one version. Records of several, as older runs have, and of weights that were undone,
do not count. Of several records of one version the last counts.
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
from shared.run.state import in_lineage
from shared.types import WeightVersion

MOST_FAILED = 0.05
"""Share of the tasks of an evaluation that may have failed without it counting as incomplete."""

type Standing = tuple[bool, float, int]
"""Orders evaluations: complete, share of all tasks that is solved at least, tasks played if it is incomplete."""


@dataclass(frozen=True, slots=True)
class MeasuredVersion:
    """`success` and `reward_mean` are means over the `n_tasks` - `failed` held-out tasks of the main environment that
    were played.
    """

    version: WeightVersion
    success: float
    reward_mean: float
    n_tasks: int
    failed: int

    @property
    def rank(self) -> tuple[Standing, float, WeightVersion]:
        """By standing, then `reward_mean`, then the newest."""
        return standing(self.success, self.n_tasks - self.failed, self.failed), self.reward_mean, self.version


def standing(success: float, played: int, failed: int) -> Standing:
    """Args: success: share of the `played` tasks, of which there is one at least; failed: tasks beside them."""
    is_complete = failed <= MOST_FAILED * (played + failed)
    return is_complete, success * played / (played + failed), 0 if is_complete else played


def best_version(evals: Path, lineage: Sequence[tuple[int, int]], step: int | None = None) -> MeasuredVersion | None:
    """None if none was measured, or the file cannot be read.

    Args:
        evals: evals.jsonl.
        lineage, step: of the newest state. No later version counts.
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
        n_tasks, failed = row.get("n_tasks", 1), row.get("failed", 0)
        is_measured = isinstance(success, int | float) and isinstance(reward, int | float) and low.step == high.step
        is_counted = isinstance(n_tasks, int) and isinstance(failed, int) and 0 <= failed < n_tasks
        if row.get("env") is not None or not is_measured or not is_counted:
            return None
        return MeasuredVersion(high, float(success), float(reward), n_tasks, failed)
    except (KeyError, TypeError, AttributeError, DecodeError):
        return None
