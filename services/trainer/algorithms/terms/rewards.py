"""Rewards of sampled tokens, float64.

Invariant: without penalty and normalization, the rewards of an episode's tokens add up to the episode's reward.
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
    """DAPO's soft overlong penalty (arXiv:2503.14476, eq. 13).

    It grows linearly from 0 at `longest` - `buffer` sampled tokens to `penalty` at `longest`, and stays there.
    """

    longest: int
    buffer: int
    penalty: float

    def of(self, n_sampled: int) -> float:
        """Compute the term to add to the reward, 0 or less."""
        over = n_sampled - (self.longest - self.buffer)
        return -self.penalty * min(1.0, max(0.0, over / self.buffer))


@dataclass(frozen=True, slots=True)
class Normalization:
    """Normalization of episode rewards, as in GRL and RAGEN.

    Pools the episodes of one task (`state`), of one environment (`inductive`), or of the step (`batch`). `mean_std`
    gives mean 0 and standard deviation 1; `asym_clip` also clips to [-1, 3].
    """

    grouping: Grouping
    method: Method


def of_tokens(trajectory: Trajectory, credit: Credit) -> np.ndarray:
    """Compute rewards float64 [T]: the episode's reward at its last sampled token.

    With credit by turn, each turn's reward is at the last token sampled before the turn's end, and the rest of the
    episode's reward at its last sampled token.
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
    """Number each run of sampled tokens from 0: int64 [T], -1 at tokens that were not sampled."""
    sampled = trajectory.loss_mask.astype(bool)
    begins = sampled & ~np.concatenate([[False], sampled[:-1]])
    return np.where(sampled, np.cumsum(begins) - 1, -1)


def reverse_kl(trajectory: Trajectory, old: np.ndarray | None = None) -> np.ndarray:
    """Compute log p(student) - log p(teacher) at sampled tokens, 0 elsewhere; float64 [T].

    The student is the sampling policy, as the trainer computes it (`old`, float32 [T]) if that is known. Differences
    are clipped to ±20 nats, so no single token that the teacher nearly excludes dominates a step.
    """
    assert trajectory.teacher_logprobs is not None
    student = trajectory.logprobs if old is None else old
    difference = student.astype(np.float64) - trajectory.teacher_logprobs.astype(np.float64)
    return np.where(trajectory.loss_mask, np.clip(difference, -_MOST_NATS, _MOST_NATS), 0.0)


def normalized(
    rewards: Sequence[np.ndarray], groups: Sequence[Sequence[Trajectory]], how: Normalization
) -> list[np.ndarray]:
    """Normalize the rewards [G] of each group over its pool."""
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
