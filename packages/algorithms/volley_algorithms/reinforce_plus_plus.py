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

import numpy as np

from services.trainer.algorithms.terms.advantages import group_relative, returns_to_go, whitened
from services.trainer.algorithms.terms.algorithm import EpisodeGroup
from services.trainer.algorithms.terms.policy_gradient import Clipped, sampled, sampled_of
from services.trainer.algorithms.terms.rewards import TokenRewards, each_sequence
from volley_algorithms.drgrpo import centred
from volley_algorithms.sections import ReinforcePlusPlusSection


class ReinforcePlusPlus(Clipped[ReinforcePlusPlusSection]):
    """PPO's loss on returns."""

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        made = self.token_rewards(groups)
        returns = [self._of_group(group, rewards) for group, rewards in zip(groups, made, strict=True)]
        following = iter(whitened([one for group in returns for one in group], sampled_of(groups)))
        return [[next(following) for _ in group] for group in returns]

    def _of_group(self, group: EpisodeGroup, rewards: Sequence[TokenRewards]) -> list[np.ndarray]:
        if self.section.baseline == "none":
            of = partial(returns_to_go, gamma=self.section.gamma)
            return [
                each_sequence(e.trajectory, of, r.along_sequences(), sampled(e))
                for e, r in zip(group, rewards, strict=True)
            ]
        scale = group_relative(np.array([r.total for r in rewards]), centred)
        return [a * sampled(e) for a, e in zip(scale, group, strict=True)]
