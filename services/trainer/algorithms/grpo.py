"""GRPO (DeepSeekMath, arXiv:2402.03300): an episode is compared with the others of its task.

With the rewards r of a group of G episodes, every token of episode i has the advantage

    A_i = (r_i - mean(r)) / (std(r, ddof=1) + 1e-6)

and the loss is the sum over tokens, weighted by `loss_agg_mode`, of

    max(-A ratio, -A clip(ratio, 1 - epsilon, 1 + epsilon_high)) + beta KL(policy || reference)
"""

from __future__ import annotations

from services.trainer.algorithms.terms.policy_gradient import GroupRelative
from shared.algorithm_schema import GrpoSection


class Grpo(GroupRelative[GrpoSection]):
    """Group-relative advantages and the clipped loss."""

    estimator = "grpo"
