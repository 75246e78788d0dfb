"""GRPO (DeepSeekMath, arXiv:2402.03300): an episode is compared with the others of its task.

With the rewards r of a group of G episodes, every token of episode i has the advantage

    A_i = (r_i - mean(r)) / (std(r, ddof=1) + 1e-6)

and the loss is the sum over tokens, weighted by `loss_agg_mode`, of

    max(-A ratio, -A clip(ratio, 1 - epsilon, 1 + epsilon_high)) + beta KL(policy || reference)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.algorithms.terms.advantages import GroupRewards
from services.trainer.algorithms.terms.algorithm import EpisodeGroup
from services.trainer.algorithms.terms.policy_gradient import Clipped
from shared.algorithm_schema import GrpoSection


def standardized(rewards: GroupRewards) -> np.ndarray:
    """Compute the advantages of a group, float64 [G]."""
    r = rewards.r
    return (r - r.mean()) / (r.std(ddof=1) + rewards.epsilon)


class Grpo(Clipped[GrpoSection]):
    """Standardized rewards of a group, and the clipped loss."""

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        return self.within_groups(groups, standardized)
