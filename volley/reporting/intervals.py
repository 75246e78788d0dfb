"""The 95 % interval of a held-out success rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from shared.run.best import Standing, standing

_Z_95 = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""


def wilson(successes: int, tasks: int) -> tuple[float, float]:
    """The 95 % score interval of a rate, as shares between 0 and 1.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927),
    without continuity correction.

    Args:
        successes: 0 … tasks.
        tasks: at least 1.
    """
    rate, z2 = successes / tasks, _Z_95**2 / tasks
    middle = rate + z2 / 2
    half = math.sqrt(z2 * rate * (1 - rate) + z2**2 / 4)
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


@dataclass(frozen=True, slots=True)
class SuccessRate:
    """Success rate of one evaluation, with its 95 % interval `low` to `high`.

    `success`: share of `tasks` that were solved. `failed`: further tasks that failed (infrastructure).
    """

    step: int
    tasks: int
    success: float
    low: float
    high: float
    failed: int = 0

    @property
    def standing(self) -> Standing:
        return standing(self.success, self.tasks, self.failed)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self | None:
        """Rate of a line of evals.jsonl; None if it lacks a figure. Failed tasks (infrastructure) are not counted."""
        step, success, tasks, failed = (row.get(key) for key in ("step", "success", "n_tasks", "failed"))
        if not isinstance(success, int | float) or not (isinstance(step, int) and isinstance(tasks, int)):
            return None
        failed = failed if isinstance(failed, int) else 0
        counted = tasks - failed
        if counted < 1 or failed < 0 or not 0 <= success <= 1:
            return None
        return cls(step, counted, float(success), *wilson(round(success * counted), counted), failed)

    def __str__(self) -> str:
        """Format as `29.0% (23.2–35.6)`."""
        return f"{self.success:.1%} ({self.low * 100:.1f}–{self.high * 100:.1f})"


def success_rates(rows: Iterable[Mapping[str, Any]]) -> list[SuccessRate]:
    return [rate for row in rows if (rate := SuccessRate.of(row)) is not None]
