"""Group advantages in float64: how much better an episode was than its siblings.

Formulas and names as in Tunix: `grpo` (DeepSeekMath, arXiv:2402.03300), `drgrpo` (arXiv:2503.20783), `rloo` (arXiv:2402.14740).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Estimator = Literal["grpo", "drgrpo", "rloo"]
_EPSILON = 1e-6


def advantages(rewards: np.ndarray, estimator: Estimator) -> np.ndarray:
    """Advantages float64 [G] of the rewards [G] of one group.

    A group of one has advantage 0: it has nobody to compare with.
    """
    r = np.asarray(rewards, np.float64)
    if len(r) < 2:
        return np.zeros(len(r))
    if estimator == "rloo":
        return r - (r.sum() - r) / (len(r) - 1)
    centred = r - r.mean()
    return centred if estimator == "drgrpo" else centred / (r.std(ddof=1) + _EPSILON)
