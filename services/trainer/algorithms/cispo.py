"""CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE weighted by the clipped ratio,

    loss = -stop_gradient(clip(ratio, 1 - epsilon, 1 + epsilon_high)) A log p

so every token keeps a gradient: PPO's clipping drops the gradients of rare tokens at which reasoning changes course.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from services.trainer.algorithms.terms.actor import ActorOptions
from services.trainer.algorithms.terms.policy_gradient import GroupRelative, RewardOptions
from shared.algorithm_schema import CispoSection


class Cispo(GroupRelative[CispoSection]):
    """GRPO with clipped importance weights in place of a clipped objective."""

    estimator = "grpo"

    @classmethod
    def of(cls, section: CispoSection, n_updates: int, max_response_length: int) -> Self:
        actor = replace(ActorOptions.of(section), surrogate="weighted")
        return cls(actor, RewardOptions.of(section), n_updates, section.advantage_estimator)
