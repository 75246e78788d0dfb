"""Group advantages in float64: how much better an episode was than the others of its group.

Formulas and names as in Tunix: `grpo` (DeepSeekMath, arXiv:2402.03300), `drgrpo` (arXiv:2503.20783), `rloo`
(arXiv:2402.14740).

Invariants: whatever finite float64 numbers the rewards are, advantages are finite in float32, and so is the square of
the loss that they make with the largest importance ratio; rewards that are equal up to rounding have advantage exactly
0.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Estimator = Literal["grpo", "drgrpo", "rloo"]
_EPSILON = 1e-6
_EQUAL = 1e-12
"""Rewards that differ by no more than this part of the largest are equal: what sums of some thousand terms differ by in
rounding.
"""
_MOST = 1e9
"""`drgrpo` and `rloo` are in units of the reward. A group with a larger advantage is scaled down to this as a whole:
times the largest ratio (e^20, see loss) and squared (the gradient's norm) it is still a float32. A norm of that size is
clipped anyway.
"""
_PLAIN = 256
"""Numbers below 2^256 in size can be squared and summed in float64 as they are."""


def advantages(rewards: np.ndarray, estimator: Estimator) -> np.ndarray:
    """Advantages float64 [G] of the finite rewards [G] of one group.

    A group of one, or of rewards that are equal up to rounding, has advantage 0: there is nobody to compare with.
    """
    given = np.asarray(rewards, np.float64)
    r, exponent = _scaled(given)
    if len(r) < 2 or float(np.ptp(r)) <= _EQUAL * float(np.abs(r).max()):
        return np.zeros(len(r))
    if estimator == "grpo":
        return (r - r.mean()) / (r.std(ddof=1) + np.ldexp(_EPSILON, -exponent))
    difference = r - r.mean() if estimator == "drgrpo" else r - (r.sum() - r) / (len(r) - 1)
    largest = float(np.abs(difference).max())
    if largest > np.ldexp(_MOST, -exponent):
        return difference / largest * _MOST
    return np.ldexp(difference, exponent)


def moments(rewards: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation (of all, ddof 0) of finite float64 numbers [N]: finite, however large these are."""
    r, exponent = _scaled(np.asarray(rewards, np.float64))
    return float(np.ldexp(r.mean(), exponent)), float(np.ldexp(r.std(), exponent))


def _scaled(r: np.ndarray) -> tuple[np.ndarray, int]:
    """The numbers divided by a power of two, which changes none of their digits, and its exponent: 0 where none is
    huge.
    """
    exponent = max(0, int(np.frexp(np.abs(r).max(initial=0.0))[1]) - _PLAIN)
    return np.ldexp(r, -exponent), exponent
