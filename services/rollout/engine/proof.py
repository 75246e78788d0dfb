"""Are these the weights that were meant? The two answers, for the engine that loads them and for the service that judges it.

The probe compares log-probabilities with the trainer's: it finds a wrong model, layout or tensor, not a wrong bit, and not an
older version once a step changes less than two implementations differ. The checksum compares bits: it finds everything, but
only what differs from the arrays that were loaded.
"""

from __future__ import annotations

import numpy as np

from shared.errors import WeightsError

# How far an engine may be from the trainer's own log-probabilities, as mean |difference|, by dtype of the engine.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


def check_probe(logprobs: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """Args:
        logprobs: float32[m], the engine's; expected: float32[n], the trainer's, of which the first m count.
        dtype: of the engine.

    Raises:
        WeightsError: the mean difference is beyond the tolerance, or not finite.
    """
    difference = float(np.abs(logprobs - expected[: len(logprobs)]).mean()) if len(logprobs) else np.nan
    limit = TOLERANCE[dtype]
    if not difference <= limit:
        raise WeightsError(
            f"the weights' fingerprint differs: mean |Δ log p| {difference:.3g} on the probe, at most {limit:g} allowed",
            "trainer and engine disagree about the model or the checkpoint is damaged",
        )
