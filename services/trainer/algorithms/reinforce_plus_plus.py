"""REINFORCE++ (arXiv:2501.03262): no critic, and no baseline per task. The advantage of a token is the sum of rewards
from it on (discounted by `gamma`), normalized to mean 0 and standard deviation 1 over all tokens of the step; the loss
is PPO's.

With `baseline: group` (REINFORCE++-baseline), every token of an episode instead has the episode's reward minus the mean
reward of the task's episodes, normalized likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np

from services.trainer.algorithms.terms.actor import ActorOptions
from services.trainer.algorithms.terms.advantages import group_relative, returns_to_go, whitened
from services.trainer.algorithms.terms.algorithm import EpisodeGroup
from services.trainer.algorithms.terms.policy_gradient import PolicyGradient, RewardOptions
from shared.algorithm_schema import ReinforcePlusPlusSection

Baseline = Literal["none", "group"]


class ReinforcePlusPlus(PolicyGradient[ReinforcePlusPlusSection]):
    """PPO's loss on returns."""

    def __init__(
        self, actor: ActorOptions, rewards: RewardOptions, n_updates: int, gamma: float, baseline: Baseline
    ) -> None:
        super().__init__(actor, rewards, n_updates)
        self._gamma, self._baseline = gamma, baseline

    @classmethod
    def of(cls, section: ReinforcePlusPlusSection, n_updates: int, max_response_length: int) -> Self:
        actor, rewards = ActorOptions.of(section), RewardOptions.of(section)
        return cls(actor, rewards, n_updates, section.gamma, section.baseline)

    def advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        made = self.token_rewards(groups)
        sampled = [[e.trajectory.loss_mask.astype(bool) for e in group] for group in groups]
        returns = [self._of_group(rewards, masks) for rewards, masks in zip(made, sampled, strict=True)]
        following = iter(whitened([one for group in returns for one in group], self.in_loss(groups)))
        return [[next(following) for _ in group] for group in returns]

    def _of_group(self, rewards: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self._baseline == "none":
            return [returns_to_go(r, s, self._gamma) for r, s in zip(rewards, sampled, strict=True)]
        scale = group_relative(np.array([float(r.sum()) for r in rewards]), "drgrpo")
        return [a * s for a, s in zip(scale, sampled, strict=True)]
