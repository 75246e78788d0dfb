"""CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE weighted by the clipped ratio,

    loss = -stop_gradient(clip(ratio, 1 - epsilon, 1 + epsilon_high)) A log p

so that every token keeps a gradient: PPO's bound drops those of the rare tokens at which reasoning turns.
"""

from __future__ import annotations

from services.trainer.algorithms.terms.policy_gradient import GroupRelative


class Cispo(GroupRelative):
    """Its actor's surrogate is the weighted one."""

    estimator = "grpo"
