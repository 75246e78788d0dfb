"""RLOO (arXiv:2402.14740): REINFORCE with the mean reward of the *other* episodes of the task as baseline,

    A_i = r_i - sum_{j != i} r_j / (G - 1)

which is unbiased. The ratio to the sampling policy is clipped as in PPO, unless `epsilon` is null.
"""

from __future__ import annotations

from services.trainer.algorithms.terms.policy_gradient import GroupRelative
from shared.algorithm_schema import RlooSection


class Rloo(GroupRelative[RlooSection]):
    """GRPO with the mean of the other episodes as baseline."""

    estimator = "rloo"
