"""How far trainer and sampler are apart on a step's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.algorithms.terms.importance import MAX_LOG_RATIO
from services.trainer.algorithms.terms.statistics import EffectiveShare
from services.trainer.batches.batch import Row

type Compared = Sequence[tuple[Row, np.ndarray]]
"""Rows with the present policy's log-probabilities of their tokens, float32 [T]."""


def mean_difference(compared: Compared) -> float | None:
    """Mean |difference| from the sampler over tokens that the present weights sampled; None without any."""
    found = [np.abs(ours.astype(np.float64) - row.behaviour)[row.mask * row.current > 0] for row, ours in compared]
    differences = np.concatenate(found)
    return float(differences.mean()) if len(differences) else None


def effective_share(compared: Compared) -> float:
    """Effective share of the sampled tokens, whose weights are the ratios of the present policy to the sampler."""
    log_ratios = np.concatenate([(ours - row.behaviour)[row.mask > 0] for row, ours in compared])
    weights = np.exp(np.clip(log_ratios.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return EffectiveShare(weights.sum(), np.square(weights).sum(), len(weights)).value() or 0.0
