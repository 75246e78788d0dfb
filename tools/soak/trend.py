"""Robust slope of a figure over time (Theil–Sen estimator).

The median of the slopes between all pairs of samples (Sen 1968, doi:10.1080/01621459.1968.10480934), with the interval
from the distribution of Kendall's tau. Neighbouring samples of a process are correlated, so the interval is somewhat
too narrow; a verdict must allow for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 2.576
"""Quantile of the normal distribution for a 99 % interval."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Slope per unit of time, and the ends of its 99 % interval."""

    slope: float
    low: float
    high: float


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Trend of at least two samples at different times; with very few, the interval covers all slopes."""
    t, v = np.asarray(times, np.float64), np.asarray(values, np.float64)
    i, j = np.triu_indices(len(t), k=1)
    slopes = np.sort((v[j] - v[i]) / (t[j] - t[i]))
    n, n_slopes = len(t), len(slopes)
    spread = _Z * float(np.sqrt(n * (n - 1) * (2 * n + 5) / 18))
    lowest, highest = (n_slopes - spread) / 2, (n_slopes + spread) / 2
    return Trend(
        float(np.median(slopes)),
        float(slopes[max(0, int(np.floor(lowest)))]),
        float(slopes[min(n_slopes - 1, int(np.ceil(highest)))]),
    )
