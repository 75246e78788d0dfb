"""GDPO (arXiv:2601.05242): several rewards, each normalized before they are added. With the rewards r_k of an episode,
weights w_k, and statistics over the group of its task

    A = sum over k of w_k (r_k - mean(r_k)) / (std(r_k, ddof=1) + 1e-6)

and then, over all n episodes of the step, (A - mean(A)) / (std(A, ddof=0) + 1e-6). If rewards are added first, a
combination of them is told from another only by its sum, and the reward with the largest spread outweighs the others.
A reward that is equal in the whole group adds nothing. The loss is PPO's.

Sources: the paper's equations 4 to 7; verl 0.9.1 `core_algos.compute_gdpo_outcome_advantage`, which normalizes over the
step's tokens (ddof=1) instead of its episodes: the same up to that factor if all episodes are equally long.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.algorithms.grpo import standardized
from services.trainer.algorithms.terms.advantages import group_relative, whitened
from services.trainer.algorithms.terms.algorithm import EpisodeGroup
from services.trainer.algorithms.terms.policy_gradient import Clipped, sampled
from volley_algorithms.sections import GdpoSection


class Gdpo(Clipped[GdpoSection]):
    """Advantages from separately normalized reward components, and the clipped loss."""

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        made = [self._of_group(group) for group in groups]
        every = [np.ones(len(group), bool) for group in groups]
        return [
            [a * sampled(e) for a, e in zip(scale, group, strict=True)]
            for scale, group in zip(whitened(made, every), groups, strict=True)
        ]

    def _of_group(self, group: EpisodeGroup) -> np.ndarray:
        components = [e.trajectory.reward_components for e in group]
        made = np.zeros(len(group))
        for name, weight in self.section.reward_components.items():
            made += weight * group_relative(np.array([one[name] for one in components]), standardized)
        return made
