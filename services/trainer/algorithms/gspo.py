"""GSPO (arXiv:2507.18071): ratio and advantage are both of whole sequences. For a sequence of n tokens

    s = (p(sequence) / p_old(sequence))^(1/n),    loss = mean over sequences of max(-A s, -A clip(s, 1 - eps, 1 + eps'))

in the form of the paper's GSPO-token, whose value and gradient are the same if all tokens of a sequence have the same
advantage. In an episode of several sequences each has its own ratio, over its own sampled tokens, because the ratio is
that of one answer to one context; all share the episode's advantage, and count together as one in the mean. A geometric
mean of ratios is much closer to 1 than a single ratio: epsilons are about 4e-4, not 0.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from services.trainer.algorithms.terms.actor import ActorOptions
from services.trainer.algorithms.terms.policy_gradient import GroupRelative, RewardOptions
from shared.algorithm_schema import GspoSection


class Gspo(GroupRelative[GspoSection]):
    """GRPO with one importance ratio for a whole sequence."""

    estimator = "grpo"

    @classmethod
    def of(cls, section: GspoSection, n_updates: int, max_response_length: int) -> Self:
        actor = replace(ActorOptions.of(section), ratio="sequence")
        return cls(actor, RewardOptions.of(section), n_updates, section.advantage_estimator)
