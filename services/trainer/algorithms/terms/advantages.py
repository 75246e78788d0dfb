"""Advantages in float64: how much better an episode was than the others of its group, or a token than was expected.

Formulas and names as in Tunix: `grpo` (DeepSeekMath, arXiv:2402.03300), `drgrpo` (arXiv:2503.20783), `rloo`
(arXiv:2402.14740); generalized advantage estimation (GAE) is arXiv:1506.02438.

Invariants: whatever finite float64 numbers the rewards are, advantages are finite in float32, and so is the square of
the loss that they make with the largest importance ratio; rewards that are equal up to rounding have advantage exactly
0.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def group_relative(rewards: np.ndarray, estimator: Estimator) -> np.ndarray:
    """Advantages float64 [G] of the finite rewards [G] of one group.

    A group of one, or of rewards that are equal up to rounding, has advantage 0: there is nobody to compare with.
    """
    given = np.asarray(rewards, np.float64)
    r, exponent = _scaled(given)
    if len(r) < 2 or are_equal(r):
        return np.zeros(len(r))
    if estimator == "grpo":
        return (r - r.mean()) / (r.std(ddof=1) + np.ldexp(_EPSILON, -exponent))
    difference = r - r.mean() if estimator == "drgrpo" else r - (r.sum() - r) / (len(r) - 1)
    largest = float(np.abs(difference).max())
    if largest > np.ldexp(_MOST, -exponent):
        return difference / largest * _MOST
    return np.ldexp(difference, exponent)


def returns_to_go(rewards: np.ndarray, sampled: np.ndarray, gamma: float) -> np.ndarray:
    """float64 [T]: at a sampled token the rewards [T] of it and of all later sampled tokens, each discounted by gamma
    for every sampled token between; 0 elsewhere. `sampled` is bool [T].
    """
    made, after = np.zeros(len(rewards)), 0.0
    for t in np.flatnonzero(sampled)[::-1]:
        after = made[t] = rewards[t] + gamma * after
    return made


def gae(rewards: np.ndarray, values: np.ndarray, sampled: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """float64 [T]: advantages of the sampled tokens, 0 elsewhere; rewards and values (what was expected from before the
    token on) are [T]. The environment's tokens are no steps: the next sampled token follows, and after the last one
    nothing is expected.
    """
    made, after, expected = np.zeros(len(rewards)), 0.0, 0.0
    for t in np.flatnonzero(sampled)[::-1]:
        after = made[t] = rewards[t] + gamma * expected - values[t] + gamma * lam * after
        expected = values[t]
    return made


def whitened(values: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values [T] of several episodes at their sampled tokens with mean 0 and standard deviation 1 (ddof 0) over all
    of them, 0 elsewhere; all 0 if they are equal up to rounding.
    """
    held = np.concatenate([v[s] for v, s in zip(values, sampled, strict=True)]) if values else np.zeros(0)
    if len(held) < 2 or are_equal(held):
        return [np.zeros(len(v)) for v in values]
    return [np.where(s, standardized(v, held), 0.0) for v, s in zip(values, sampled, strict=True)]


def standardized(values: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """The finite values less the mean of the pool, divided by its standard deviation (ddof 0) + 1e-6; float64, of any
    size.
    """
    scaled, exponent = _scaled(np.asarray(pool, np.float64))
    epsilon = np.ldexp(_EPSILON, -exponent)
    return (np.ldexp(np.asarray(values, np.float64), -exponent) - scaled.mean()) / (scaled.std() + epsilon)


def are_equal(values: np.ndarray) -> bool:
    """Whether finite float64 numbers [N], at least one, differ by no more than rounding."""
    with np.errstate(over="ignore"):  # of numbers that are that far apart, it says no
        return float(np.ptp(values)) <= _EQUAL * float(np.abs(values).max())


def bounded(values: np.ndarray) -> np.ndarray:
    """The values [T] scaled down as a whole so that none is above 1e9 in size: see `_MOST`."""
    most = float(np.abs(values).max(initial=0.0))
    return values / most * _MOST if most > _MOST else values


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
