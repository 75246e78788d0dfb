"""Rewards of sampled tokens, float64.

Arrays [N] are of all tokens that an episode stores: those of each of its sequences, one after the other, each once.

Invariant: without penalty and normalization, the rewards of an episode's tokens add up to the episode's reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True)
class Normalization:
    """Normalization of episode rewards, as in GRL and RAGEN.

    Pools the episodes of one task (`state`), of one environment (`inductive`), or of the step (`batch`); those of each
    seat of a game apart, but for `batch`. `mean_std`
    gives mean 0 and standard deviation 1; `asym_clip` also clips to [-1, 3].
    """

    grouping: Grouping
    method: Method


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Rewards of an episode's tokens, float64 [N].

    `outcome` is the part that belongs to the whole episode. In `tokens` it is included once, at the last sampled token
    of sequence 0. `ends` are the last sampled tokens of the sequences. `credited` replaces the rewards along sequences
    where the user's own rule gives turns their credit (see `credit`).
    """

    tokens: np.ndarray
    outcome: float
    ends: tuple[int, ...]
    credited: np.ndarray | None = None

    @property
    def total(self) -> float:
        return float(self.tokens.sum())

    def along_sequences(self) -> np.ndarray:
        """Return rewards float64 [N] with the outcome at the end of each sequence: each led to it."""
        if self.credited is not None:
            return self.credited.copy()
        made = self.tokens.copy()
        for end in self.ends[1:]:
            made[end] += self.outcome
        return made

    def with_total(self, total: float) -> TokenRewards:
        """Change the outcome so that the episode's rewards add up to `total`."""
        made = self.tokens.copy()
        made[list(self.ends)] = 0.0
        outcome = total - made.sum()
        made[self.ends[0]] = outcome
        return TokenRewards(made, outcome, self.ends)


def of_tokens(trajectory: Trajectory, credit: Credit, penalty: float = 0.0) -> TokenRewards:
    """Compute the rewards of tokens: the episode's reward, plus `penalty`, is the outcome.

    With credit by turn, each turn's reward is at the last token of its sequence sampled before the turn's end, and the
    rest of the episode's reward is the outcome. If there are branches, the reward of sequence 0's last turn is part of
    the outcome: it came at the end of the whole episode.
    """
    made, outcome, ends, first = np.zeros(trajectory.n_stored), float(trajectory.reward), list[int](), 0
    shared = [0, *(branch.shared for branch in trajectory.branches)]
    for one, n_shared in zip((trajectory, *trajectory.branches), shared, strict=True):
        sampled = first + np.flatnonzero(one.loss_mask)
        last = len(sampled) - 1 if trajectory.branches and one is trajectory else None
        if credit == "turn":
            for turn in one.turns:
                place = int(np.searchsorted(sampled, first + turn.end - n_shared)) - 1
                if turn.reward and place >= 0 and place != last:
                    made[sampled[place]] += turn.reward
                    outcome -= turn.reward
        ends.append(int(sampled[-1]))
        first += len(one.token_ids)
    made[ends[0]] += outcome
    made[ends[0]] += penalty
    return TokenRewards(made, outcome + penalty, tuple(ends))


def turn_of_tokens(trajectory: Trajectory) -> np.ndarray:
    """Number the runs of sampled tokens of each whole sequence from 0: int64 [N], -1 at other tokens."""
    whole, made = list[np.ndarray](), list[np.ndarray]()
    for number, one in enumerate((trajectory, *trajectory.branches)):
        branch = trajectory.branches[number - 1] if number else None
        before = whole[branch.parent][: branch.shared] if branch and branch.shared else np.zeros(0, np.int64)
        sampled = one.loss_mask.astype(bool)
        begins = sampled & ~np.concatenate([[False], sampled[:-1]])
        made.append(np.where(sampled, before.max(initial=-1) + np.cumsum(begins), -1))
        whole.append(np.concatenate([before, made[-1]]))
    return np.concatenate(made)


def each_sequence(trajectory: Trajectory, compute: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """Apply `compute` to the own tokens of each sequence, and join the results: [N] to [N]."""
    ends = np.cumsum(trajectory.own_lengths())[:-1]
    parts = zip(*(np.split(one, ends) for one in arrays), strict=True)
    return np.concatenate([compute(*part) for part in parts])


def normalized(
    rewards: Sequence[np.ndarray], groups: Sequence[Sequence[Trajectory]], how: Normalization
) -> list[np.ndarray]:
    """Normalize the rewards [G] of each group over its pool."""
    if how.method == "identity":
        return list(rewards)
    keys = [_key(i, group, how.grouping) for i, group in enumerate(groups)]
    pools = {key: np.concatenate([r for r, k in zip(rewards, keys, strict=True) if k == key]) for key in set(keys)}
    return [_standard(r, pools[key], how.method) for r, key in zip(rewards, keys, strict=True)]


def _key(index: int, group: Sequence[Trajectory], grouping: Grouping) -> int | tuple[str, ...]:
    if grouping == "batch":
        return ()
    return index if grouping == "state" else (group[0].env, *group[0].seats[:1])


def _standard(rewards: np.ndarray, pool: np.ndarray, method: Method) -> np.ndarray:
    centre, scale = moments(pool)
    if scale <= _EPSILON * max(1.0, abs(centre)):
        return np.zeros(len(rewards))
    made = standardized(rewards, pool)
    return np.clip(made, *_ASYMMETRIC) if method == "asym_clip" else made
