"""Which weights of a run solved the most held-out tasks, by evals.jsonl.

Every evaluation measures exactly one version. Records of several, as older runs have, and of weights that were undone,
do not count.
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


@dataclass(frozen=True, order=True, slots=True)
class MeasuredVersion:
    """By `success`, then `reward_mean`, then the newest; both are means over the held-out tasks of the main
    environment.
    """

    success: float
    reward_mean: float
    version: WeightVersion


def best_version(evals: Path, lineage: Sequence[tuple[int, int]]) -> MeasuredVersion | None:
    """None if none was measured, or the file cannot be read. Args: evals: evals.jsonl; lineage: of the newest
    checkpoint.
    """
    try:
        found = [one for text in whole_lines(evals) if (one := _measured(text)) is not None]
    except OSError:
        return None
    return max((one for one in found if in_lineage(one.version, lineage)), default=None)


def _measured(text: bytes) -> MeasuredVersion | None:
    try:
        row: Mapping[str, Any] = codec.from_json(text, "a line of evaluations", MAX_LINE_VALUES)
        low, high = (WeightVersion.parse(row[key]) for key in ("version_min", "version_max"))
        success, reward = row["success"], row["reward_mean"]
        is_measured = isinstance(success, int | float) and isinstance(reward, int | float) and low.step == high.step
        if row.get("env") is not None or not is_measured:
            return None
        return MeasuredVersion(float(success), float(reward), high)
    except (KeyError, TypeError, AttributeError, DecodeError):
        return None
