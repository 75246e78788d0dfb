"""PPO (arXiv:1707.06347) with a critic, which learns the expected reward from each token on.

With the rewards r_t of sampled tokens (the episode's reward at its last token, or each turn's at the turn's last), and
the critic's values V_t before token t, generalized advantage estimation (arXiv:1506.02438) gives

    delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lambda A_{t+1},    return_t = A_t + V_t

where t + 1 is the next *sampled* token: the environment's tokens between two turns are not steps. Advantages are
normalized to mean 0 and standard deviation 1 over the tokens of the step (`whiten_advantages`). The critic learns the
returns; each value is clipped to within `clip_range_value` of its value at the start of the step:

    value loss = 1/2 max((V - return)^2, (clip(V, V_old - c, V_old + c) - return)^2)

In an episode of several sequences, each is a path of its own: t runs over its own sampled tokens, and it ends with the
episode's reward, as in CompactionRL (arXiv:2607.05378), where a summary's tokens earn the reward of what follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.actor import ActorOptions
from services.trainer.algorithms.terms.advantages import bounded, gae, whitened
from services.trainer.algorithms.terms.algorithm import Episode, EpisodeGroup, Needs
from services.trainer.algorithms.terms.policy_gradient import PolicyGradient, RewardOptions, sampled
from services.trainer.algorithms.terms.rewards import each_sequence
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch
from shared.algorithm_schema import PpoSection


@dataclass(frozen=True, slots=True)
class CriticOptions:
    """Options of the critic; `clip_range` limits how far a value moves in one step, None does not."""

    gamma: float
    lam: float
    whiten: bool
    clip_range: float | None


class Ppo(PolicyGradient[PpoSection]):
    """The actor's loss on advantages from a critic."""

    def __init__(self, actor: ActorOptions, rewards: RewardOptions, n_updates: int, critic: CriticOptions) -> None:
        super().__init__(actor, rewards, n_updates)
        self.critic = critic

    @classmethod
    def of(cls, section: PpoSection, n_updates: int, max_response_length: int) -> Self:
        critic = CriticOptions(section.gamma, section.gae_lambda, section.whiten_advantages, section.clip_range_value)
        return cls(ActorOptions.of(section), RewardOptions.of(section), n_updates, critic)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, values=True)

    def advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        made = self._unscaled(groups)
        if not self.critic.whiten:
            return [[bounded(one) for one in group] for group in made]
        following = iter(whitened([one for group in made for one in group], self.in_loss(groups)))
        return [[next(following) for _ in group] for group in made]

    def returns(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        """Compute the critic's targets, float64 [N] for each episode; 0 at tokens that were not sampled."""
        return [
            [bounded(a + _values(e)) for a, e in zip(made, group, strict=True)]
            for made, group in zip(self._unscaled(groups), groups, strict=True)
        ]

    def value_loss(self, values: jax.Array, batch: Batch) -> tuple[jax.Array, Statistics]:
        """Compute the loss, float32 scalar, and statistics from the critic's present values, float32 [B, T]."""
        assert batch.values is not None
        assert batch.returns is not None
        mask, was = batch.mask, batch.values
        error = jnp.where(mask > 0, values - batch.returns, 0.0)
        squared, is_clipped = jnp.square(error), jnp.zeros_like(mask, bool)
        if self.critic.clip_range is not None:
            near = jnp.clip(values, was - self.critic.clip_range, was + self.critic.clip_range)
            held = jnp.square(jnp.where(mask > 0, near - batch.returns, 0.0))
            is_clipped, squared = held > squared, jnp.maximum(held, squared)
        loss = (0.5 * squared * mask * batch.weight).sum()
        return loss, {
            "critic/value_loss": statistics.mean(0.5 * squared, mask),
            "critic/clip_fraction": statistics.mean(is_clipped, mask),
            "critic/value_mean": statistics.mean(values, mask),
            "critic/return_mean": statistics.mean(jnp.asarray(batch.returns), mask),
            "critic/explained_variance": statistics.explained_variance(values, jnp.asarray(batch.returns), mask),
        }

    def _unscaled(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        of = partial(gae, gamma=self.critic.gamma, lam=self.critic.lam)
        return [
            [
                each_sequence(e.trajectory, of, r.along_sequences(), _values(e), sampled(e))
                for r, e in zip(rewards, group, strict=True)
            ]
            for rewards, group in zip(self.token_rewards(groups), groups, strict=True)
        ]


def _values(episode: Episode) -> np.ndarray:
    assert episode.values is not None
    return episode.values.astype(np.float64)
