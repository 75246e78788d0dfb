"""PPO (arXiv:1707.06347) with a critic, which learns the expected reward from each token on.

With the rewards r_t of sampled tokens (the episode's reward at its last token, or each turn's at the turn's last), and
the critic's values V_t before token t, generalized advantage estimation (arXiv:1506.02438) gives

    delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lambda A_{t+1},    return_t = A_t + V_t

where t + 1 is the next *sampled* token: the environment's tokens between two turns are not steps. The value after the
last one is 0, also in an episode that a limit cut off: nothing is bootstrapped there (as in TRL and verl). lambda may
depend on the length (`gae_lambda_alpha` a, VAPO, arXiv:2504.05118, eq. 10), for a sequence of l sampled tokens
1 - 1 / (a l); the critic's targets may have their own (`critic_gae_lambda`, decoupled GAE, arXiv:2503.01491).
Advantages are normalized to mean 0 and standard deviation 1 over the tokens of the step (`whiten_advantages`). The
critic learns the returns; each value is clipped to within `clip_range_value` of its value at the start of the step:

    value loss = 1/2 max((V - return)^2, (clip(V, V_old - c, V_old + c) - return)^2)

In an episode of several sequences, each is a path of its own: t runs over its own sampled tokens, and it ends with the
episode's reward, as in CompactionRL (arXiv:2607.05378), where a summary's tokens earn the reward of what follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.advantages import bounded, gae, whitened
from services.trainer.algorithms.terms.algorithm import EpisodeGroup, EpisodeTokens, Needs
from services.trainer.algorithms.terms.policy_gradient import Clipped, PolicyGradient, sampled, sampled_of
from services.trainer.algorithms.terms.rewards import each_sequence
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch
from shared.algorithm_base import CriticSection
from shared.algorithm_schema import PpoSection


class WithCritic[S: CriticSection](PolicyGradient[S]):
    """Advantages from a critic, and the critic's own targets and loss."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, values=True)

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        made = self._unscaled(groups, self.section.gae_lambda, self.section.gae_lambda_alpha)
        if not self.section.whiten_advantages:
            return [[bounded(one) for one in group] for group in made]
        following = iter(whitened([one for group in made for one in group], sampled_of(groups)))
        return [[next(following) for _ in group] for group in made]

    def returns(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        """Compute the critic's targets, float64 [N] for each episode; 0 at tokens that were not sampled."""
        return self.zero_outside_loss(groups, self._returns)

    def _returns(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        own = self.section.critic_gae_lambda
        lam, alpha = (self.section.gae_lambda, self.section.gae_lambda_alpha) if own is None else (own, None)
        return [
            [bounded(a + _values(e)) for a, e in zip(made, group, strict=True)]
            for made, group in zip(self._unscaled(groups, lam, alpha), groups, strict=True)
        ]

    def value_loss(self, values: jax.Array, batch: Batch) -> tuple[jax.Array, Statistics]:
        """Compute the loss, float32 scalar, and statistics from the critic's present values, float32 [B, T]."""
        assert batch.values is not None
        assert batch.returns is not None
        mask, was = batch.mask, batch.values
        error = jnp.where(mask > 0, values - batch.returns, 0.0)
        squared, is_clipped = jnp.square(error), jnp.zeros_like(mask, bool)
        if self.section.clip_range_value is not None:
            near = jnp.clip(values, was - self.section.clip_range_value, was + self.section.clip_range_value)
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

    def _unscaled(self, groups: Sequence[EpisodeGroup], lam: float, alpha: float | None) -> list[list[np.ndarray]]:
        of = partial(_gae_of_sequence, gamma=self.section.gamma, lam=lam, alpha=alpha)
        return [
            [
                each_sequence(e.trajectory, of, r.along_sequences(), _values(e), sampled(e))
                for r, e in zip(rewards, group, strict=True)
            ]
            for rewards, group in zip(self.token_rewards(groups), groups, strict=True)
        ]


class Ppo(WithCritic[PpoSection], Clipped[PpoSection]):
    """The clipped loss on advantages from a critic."""


def _gae_of_sequence(
    rewards: np.ndarray, values: np.ndarray, sampled: np.ndarray, *, gamma: float, lam: float, alpha: float | None
) -> np.ndarray:
    if alpha is not None:
        lam = max(0.0, 1.0 - 1.0 / (alpha * max(1, int(sampled.sum()))))
    return gae(rewards, values, sampled, gamma, lam)


def _values(episode: EpisodeTokens) -> np.ndarray:
    assert episode.values is not None
    return episode.values.astype(np.float64)
