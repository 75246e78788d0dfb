"""Are these the weights that were meant? The two answers, for the engine that loads them and for the service that
judges it.

The probe compares log-probabilities with the trainer's: it finds a wrong model, layout or tensor, not a wrong bit, and
not an older version once a step changes less than the arithmetic's rounding. The checksum compares bits: it finds
everything, but only what differs from the arrays that were loaded.
"""

from __future__ import annotations

import numpy as np

from shared.errors import WeightsError
from shared.run.rounding import FLOOR, LARGEST_LIMIT, MEAN_LIMIT

# For probes of 16 tokens that do not tell the rounding: mean |Δ log p|.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


def check_probe(logprobs: np.ndarray, expected: np.ndarray, noise: float | None, dtype: str) -> None:
    """Args:
        logprobs: float32[m], the engine's; expected: float32[n], the trainer's, of which the first m count.
        noise: mean |difference| of the trainer's own arithmetic in the engine's dtype from `expected`; None if it did
            not say.
        dtype: of the engine.

    Raises:
        WeightsError: the mean or the largest difference is beyond its limit, or not finite.
    """
    difference = np.abs(logprobs - expected[: len(logprobs)])
    mean, largest = (float(difference.mean()), float(difference.max())) if len(difference) else (np.nan, np.nan)
    if noise is None:
        limit, most = TOLERANCE[dtype], np.inf
    else:
        limit, most = (times * max(noise, FLOOR) for times in (MEAN_LIMIT, LARGEST_LIMIT))
    if not (mean <= limit and largest <= most):
        raise WeightsError(
            f"the weights' fingerprint differs: |Δ log p| on the probe of {len(difference)} tokens is {mean:.3g} on"
            f" average and at most {largest:.3g}, allowed are {limit:.3g} and {most:.3g}",
            "trainer and engine disagree about the model, or the checkpoint is damaged or of another version",
        )
