"""MaxRL (arXiv:2602.02710): maximum likelihood of success. With the rewards r of a group of G episodes

    A_i = (r_i - mean(r)) / mean(r),    0 if mean(r) is not positive

For rewards of 0 and 1 this is the gradient of the log of the task's success rate, truncated to the order G: a task that
succeeds rarely weighs about 1 / (success rate) more than with `drgrpo`. Rewards have to be 0 or more. The loss is
PPO's; the paper's own is REINFORCE, which on data of the present policy has the same gradient.

Sources: the paper's estimator; prime-rl `orchestrator/algo/max_rl.py`; TRL's MaxRLTrainer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.algorithms.terms.advantages import GroupRewards, bounded
from services.trainer.algorithms.terms.algorithm import EpisodeGroup
from services.trainer.algorithms.terms.policy_gradient import Clipped
from volley_algorithms.sections import MaxRlSection


def by_mean(rewards: GroupRewards) -> np.ndarray:
    """Compute the advantages of a group, float64 [G]; at most G - 1 if no reward is negative."""
    mean = rewards.r.mean()
    return bounded((rewards.r - mean) / mean) if mean > 0 else np.zeros(len(rewards.r))


class MaxRl(Clipped[MaxRlSection]):
    """GRPO with advantages divided by the group's mean reward."""

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        return self.within_groups(groups, by_mean)
