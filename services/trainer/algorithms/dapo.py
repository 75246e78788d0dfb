"""DAPO (arXiv:2503.14476): GRPO's advantages with a higher upper bound of the ratio (`epsilon_high`), so that rare
tokens can grow; equal weight for every token of the step (`token-mean`); and a soft penalty for overlong episodes (see
`Overlong`). Its fourth part, dynamic sampling, replaces groups of equal rewards: a filter, not part of the loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from services.trainer.algorithms.terms.actor import ActorOptions
from services.trainer.algorithms.terms.policy_gradient import GroupRelative, RewardOptions
from services.trainer.algorithms.terms.rewards import Overlong
from shared.algorithm_schema import DapoSection


class Dapo(GroupRelative[DapoSection]):
    """GRPO with a penalty for overlong episodes; the other differences are defaults of its section."""

    estimator = "grpo"

    @classmethod
    def of(cls, section: DapoSection, n_updates: int, max_response_length: int) -> Self:
        rewards = RewardOptions.of(section)
        if section.overlong_buffer is not None:
            longest = section.overlong_length or max_response_length
            rewards = replace(rewards, overlong=Overlong(longest, section.overlong_buffer, section.overlong_penalty))
        return cls(ActorOptions.of(section), rewards, n_updates, section.advantage_estimator)
