"""Advantages in float64, of episodes against their group and of tokens against a critic.

Generalized advantage estimation (GAE) is arXiv:1506.02438; estimates within a group are those of the algorithms.

Invariants: for any finite float64 rewards, advantages are finite in float32, and so is the square of the loss that they
give with the largest importance ratio; rewards that are equal up to rounding have advantage exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from shared.group_rules import are_equal

_EPSILON = 1e-6
_MOST = 1e9
"""Largest advantage. Some estimates are in units of the reward; a group with a larger advantage is scaled down as
a whole. This value times the largest ratio (e^20, see `importance`), squared (the gradient's norm), is still finite in
float32. A norm of that size is clipped anyway.
"""
_PLAIN = 256
"""Numbers of magnitude below 2^256 can be squared and summed in float64 without scaling."""


class GroupRewards(NamedTuple):
    """Finite rewards of a group, not all equal: `r` float64 [G] times 2^`exponent`, so that squares do not overflow."""

    r: np.ndarray
    exponent: int

    @property
    def epsilon(self) -> float:
        """The 1e-6 that is added to a divisor, in units of `r`."""
        return float(np.ldexp(_EPSILON, -self.exponent))

    def in_units(self, difference: np.ndarray) -> np.ndarray:
        """Convert differences of `r` [G] to the rewards' own unit; if one is too large, all are scaled down."""
        largest = float(np.abs(difference).max())
        if largest > np.ldexp(_MOST, -self.exponent):
            return difference / largest * _MOST
        return np.ldexp(difference, self.exponent)


type Estimate = Callable[[GroupRewards], np.ndarray]
"""Advantages float64 [G] of the episodes of one group."""


def group_relative(rewards: np.ndarray, estimate: Estimate) -> np.ndarray:
    """Compute advantages float64 [G] from the finite rewards [G] of one group.

    All are 0 in a group of one, or of rewards that are equal up to rounding.
    """
    made = GroupRewards(*_scaled(np.asarray(rewards, np.float64)))
    return np.zeros(len(made.r)) if len(made.r) < 2 or are_equal(made.r) else estimate(made)


def returns_to_go(rewards: np.ndarray, sampled: np.ndarray, gamma: float) -> np.ndarray:
    """Compute returns float64 [T] from rewards [T]: at a sampled token, its reward and those of later sampled tokens.

    A reward is discounted by gamma for each sampled token of distance; 0 elsewhere. `sampled` is bool [T].
    """
    made, after = np.zeros(len(rewards)), 0.0
    for t in np.flatnonzero(sampled)[::-1]:
        after = made[t] = rewards[t] + gamma * after
    return made


def gae(rewards: np.ndarray, values: np.ndarray, sampled: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Compute advantages float64 [T] of sampled tokens, 0 elsewhere, from rewards and values [T].

    A token's value is the expected reward before it. The environment's tokens are not steps: the next sampled token
    follows, and the value after the last one is 0.
    """
    made, after, expected = np.zeros(len(rewards)), 0.0, 0.0
    for t in np.flatnonzero(sampled)[::-1]:
        after = made[t] = rewards[t] + gamma * expected - values[t] + gamma * lam * after
        expected = values[t]
    return made


def whitened(values: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Normalize the values [T] of several episodes to mean 0 and standard deviation 1 (ddof 0) over sampled tokens.

    Other tokens get 0; all get 0 if the values are equal up to rounding.
    """
    held = np.concatenate([v[s] for v, s in zip(values, sampled, strict=True)]) if values else np.zeros(0)
    if len(held) < 2 or are_equal(held):
        return [np.zeros(len(v)) for v in values]
    return [np.where(s, standardized(v, held), 0.0) for v, s in zip(values, sampled, strict=True)]


def standardized(values: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """Subtract the pool's mean and divide by its standard deviation (ddof 0) + 1e-6; any finite float64 values."""
    scaled, exponent = _scaled(np.asarray(pool, np.float64))
    epsilon = np.ldexp(_EPSILON, -exponent)
    return (np.ldexp(np.asarray(values, np.float64), -exponent) - scaled.mean()) / (scaled.std() + epsilon)


def bounded(values: np.ndarray) -> np.ndarray:
    """Scale the values [T] down as a whole if one exceeds 1e9 in magnitude: see `_MOST`."""
    most = float(np.abs(values).max(initial=0.0))
    return values / most * _MOST if most > _MOST else values


def moments(rewards: np.ndarray) -> tuple[float, float]:
    """Compute mean and standard deviation (ddof 0) of finite float64 numbers [N] of any size without overflow."""
    r, exponent = _scaled(np.asarray(rewards, np.float64))
    return float(np.ldexp(r.mean(), exponent)), float(np.ldexp(r.std(), exponent))


def _scaled(r: np.ndarray) -> tuple[np.ndarray, int]:
    """Divide the numbers by a power of two, which is exact; return its exponent too, 0 if none is huge."""
    exponent = max(0, int(np.frexp(np.abs(r).max(initial=0.0))[1]) - _PLAIN)
    return np.ldexp(r, -exponent), exponent
