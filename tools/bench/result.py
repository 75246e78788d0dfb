"""Result of a benchmark: a figure, and a reference measured in the same run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import orjson


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A figure. `ratio` is value / reference; both are None if there is no reference."""

    value: float
    unit: str
    reference: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.value / self.reference if self.reference else None


def emit(results: dict[str, BenchResult]) -> None:
    """Print {name: {value, unit, reference, ratio}} as one line, the program's last."""
    record = {name: {**asdict(result), "ratio": result.ratio} for name, result in results.items()}
    sys.stdout.write(orjson.dumps(record).decode() + "\n")


def seconds_per_call(call: Callable[[], object], min_total_s: float = 0.5) -> float:
    """Seconds of the fastest of at least five calls that take `min_total_s` in total: noise only slows down."""
    best, started, n = float("inf"), time.perf_counter(), 0
    while n < 5 or time.perf_counter() - started < min_total_s:
        before = time.perf_counter()
        call()
        best, n = min(best, time.perf_counter() - before), n + 1
    return best
