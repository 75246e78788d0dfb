"""Check that loaded weights are the intended ones: by a probe and by a checksum, in the engine and in the service.

The probe compares log-probabilities with the trainer's: it finds a wrong model, layout or tensor, not a wrong bit, and
not an older version once a step changes less than the arithmetic's rounding. The checksum compares bits: it finds
everything, but only what differs from the arrays that were loaded.
"""

from __future__ import annotations

import numpy as np

from shared.errors import WeightsError
from shared.run.rounding import FLOOR, LIMIT, MOST, UNKNOWN_NOISE


def check_probe(logprobs: np.ndarray, expected: np.ndarray, noise: np.ndarray | None, dtype: str) -> None:
    """Compare differences with what rounding does to each token of this model (shared.run.rounding).

    Args:
        logprobs: float32[m], the engine's; expected: float32[n], the trainer's, of which the first m count.
        noise: float32[n], standard deviation of each of `expected` under rounding; None if the trainer did not say.
        dtype: of the engine.

    Raises:
        WeightsError: the differences are beyond the limit, or not finite.
    """
    n = len(logprobs)
    difference = np.abs(logprobs - expected[:n])
    scale = np.full(n, UNKNOWN_NOISE[dtype]) if noise is None else np.hypot(noise[:n], FLOOR)
    ratio = float(np.minimum(difference / scale, MOST).mean()) if n else np.nan
    if not (ratio <= LIMIT and np.isfinite(difference).all()):
        raise WeightsError(
            f"the weights' fingerprint differs: on the probe of {n} tokens |Δ log p| is {ratio:.3g} times what rounding"
            f" explains, allowed is {LIMIT:g} (median {np.median(difference):.3g}, noise {np.median(scale):.3g})",
            "trainer and engine disagree about the model, or the checkpoint is damaged or of another version",
        )
