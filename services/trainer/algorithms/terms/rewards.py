"""What an episode is rewarded for, and where in it: float64, at the tokens that the policy sampled.

Invariant: without a penalty or a normalization, the rewards of an episode's tokens add up to the episode's reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.trainer.algorithms.terms.advantages import moments, standardized
from shared.types import Trajectory

Credit = Literal["episode", "turn"]
Grouping = Literal["state", "inductive", "batch"]
Method = Literal["identity", "mean_std", "asym_clip"]
_EPSILON = 1e-6
_ASYMMETRIC = (-1.0, 3.0)
_MOST_NATS = 20.0


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft punishment (arXiv:2503.14476, eq. 13): an episode of more than `longest` - `buffer` sampled tokens
    loses linearly up to `penalty`, which it loses from `longest` tokens on.
    """

    longest: int
    buffer: int
    penalty: float

    def of(self, n_sampled: int) -> float:
        """What is added to the reward: 0 or less."""
        over = n_sampled - (self.longest - self.buffer)
        return -self.penalty * min(1.0, max(0.0, over / self.buffer))


@dataclass(frozen=True, slots=True)
class Normalization:
    """Of the episodes' rewards, as GRL and RAGEN do it: over the episodes of one task (`state`), of one environment
    (`inductive`), or of the step (`batch`); to mean 0 and standard deviation 1 (`mean_std`), cut to [-1, 3] with
    `asym_clip`.
    """

    grouping: Grouping
    method: Method


def of_tokens(trajectory: Trajectory, credit: Credit) -> np.ndarray:
    """float64 [T]: the episode's reward at its last sampled token; with credit by turn each turn's reward at the last
    token that was sampled by its end, and what is left of the episode's reward at the last one.
    """
    sampled = np.flatnonzero(trajectory.loss_mask)
    made, left = np.zeros(len(trajectory.token_ids)), float(trajectory.reward)
    if credit == "turn":
        for turn in trajectory.turns:
            place = int(np.searchsorted(sampled, turn.end)) - 1
            if turn.reward and place >= 0:
                made[sampled[place]] += turn.reward
                left -= turn.reward
    made[sampled[-1]] += left
    return made


def turn_of_tokens(trajectory: Trajectory) -> np.ndarray:
    """int64 [T]: the how-manieth run of sampled tokens a sampled token is in, from 0; -1 elsewhere."""
    sampled = trajectory.loss_mask.astype(bool)
    begins = sampled & ~np.concatenate([[False], sampled[:-1]])
    return np.where(sampled, np.cumsum(begins) - 1, -1)


def reverse_kl(trajectory: Trajectory, old: np.ndarray | None = None) -> np.ndarray:
    """float64 [T]: log p(student) - log p(teacher) at sampled tokens, 0 elsewhere. The student is the policy that
    sampled: as the trainer computes it (`old`, float32 [T]) where that is known.

    A difference counts for ±20 nats at most, so no token that a teacher all but excludes decides a step.
    """
    assert trajectory.teacher_logprobs is not None
    student = trajectory.logprobs if old is None else old
    difference = student.astype(np.float64) - trajectory.teacher_logprobs.astype(np.float64)
    return np.where(trajectory.loss_mask, np.clip(difference, -_MOST_NATS, _MOST_NATS), 0.0)


def normalized(
    rewards: Sequence[np.ndarray], groups: Sequence[Sequence[Trajectory]], how: Normalization
) -> list[np.ndarray]:
    """The rewards [G] of each group, normalized over those that belong together."""
    if how.method == "identity":
        return list(rewards)
    keys = [_key(i, group, how.grouping) for i, group in enumerate(groups)]
    pools = {key: np.concatenate([r for r, k in zip(rewards, keys, strict=True) if k == key]) for key in set(keys)}
    return [_standard(r, pools[key], how.method) for r, key in zip(rewards, keys, strict=True)]


def _key(index: int, group: Sequence[Trajectory], grouping: Grouping) -> int | str:
    if grouping == "batch":
        return ""
    return index if grouping == "state" else group[0].env


def _standard(rewards: np.ndarray, pool: np.ndarray, method: Method) -> np.ndarray:
    centre, scale = moments(pool)
    if scale <= _EPSILON * max(1.0, abs(centre)):
        return np.zeros(len(rewards))
    made = standardized(rewards, pool)
    return np.clip(made, *_ASYMMETRIC) if method == "asym_clip" else made
