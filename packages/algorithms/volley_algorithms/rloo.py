"""RLOO (arXiv:2402.14740): REINFORCE with the mean reward of the *other* episodes of the task as baseline,

    A_i = r_i - sum_{j != i} r_j / (G - 1)

which is unbiased. The ratio to the sampling policy is clipped as in PPO, unless `epsilon` is null.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.algorithms.terms.advantages import GroupRewards
from services.trainer.algorithms.terms.algorithm import EpisodeGroup
from services.trainer.algorithms.terms.policy_gradient import Clipped
from volley_algorithms.sections import RlooSection


def leave_one_out(rewards: GroupRewards) -> np.ndarray:
    """Compute the advantages of a group, float64 [G]."""
    r = rewards.r
    return rewards.in_units(r - (r.sum() - r) / (len(r) - 1))


class Rloo(Clipped[RlooSection]):
    """GRPO with the mean of the other episodes as baseline."""

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        return self.within_groups(groups, leave_one_out)
