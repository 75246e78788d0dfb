"""REINFORCE++ (arXiv:2501.03262): no critic, and no baseline per task. The advantage of a token is the sum of rewards
from it on (discounted by `gamma`), normalized to mean 0 and standard deviation 1 over all tokens of the step; the loss
is PPO's.

With `baseline: group` (REINFORCE++-baseline), every token of an episode instead has the episode's reward minus the mean
reward of the task's episodes, normalized likewise.

In an episode of several sequences, rewards add up along each sequence, over its own tokens; each sequence ends with the
episode's reward, because each led to it. With `baseline: group` all its tokens share the episode's advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, Self

import numpy as np

from services.trainer.algorithms.terms.actor import ActorOptions
from services.trainer.algorithms.terms.advantages import group_relative, returns_to_go, whitened
from services.trainer.algorithms.terms.algorithm import EpisodeGroup
from services.trainer.algorithms.terms.policy_gradient import PolicyGradient, RewardOptions, sampled
from services.trainer.algorithms.terms.rewards import TokenRewards, each_sequence
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
        returns = [self._of_group(group, rewards) for group, rewards in zip(groups, made, strict=True)]
        following = iter(whitened([one for group in returns for one in group], self.in_loss(groups)))
        return [[next(following) for _ in group] for group in returns]

    def _of_group(self, group: EpisodeGroup, rewards: Sequence[TokenRewards]) -> list[np.ndarray]:
        if self._baseline == "none":
            of = partial(returns_to_go, gamma=self._gamma)
            return [
                each_sequence(e.trajectory, of, r.along_sequences(), sampled(e))
                for e, r in zip(group, rewards, strict=True)
            ]
        scale = group_relative(np.array([r.total for r in rewards]), "drgrpo")
        return [a * sampled(e) for a, e in zip(scale, group, strict=True)]
