"""On-policy distillation without rewards: only a teacher's log-probabilities grade the student's episodes. The
advantage of a token is

    A_t = - coef * sum over sampled tokens s >= t of gamma^(s - t) (log p_student(x_s) - log p_teacher(x_s))

With `gamma` 0 a token gets only its own term (as in "On-Policy Distillation", Thinking Machines, 2025); with 1 also
those of all later tokens of its sequence (the long-term part of MiniLLM, arXiv:2306.08543). See `terms.distillation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import numpy as np

from services.trainer.algorithms.terms.actor import ActorOptions
from services.trainer.algorithms.terms.advantages import returns_to_go
from services.trainer.algorithms.terms.algorithm import EpisodeGroup, Needs
from services.trainer.algorithms.terms.distillation import penalty
from services.trainer.algorithms.terms.policy_gradient import PolicyGradient, RewardOptions, sampled
from services.trainer.algorithms.terms.rewards import each_sequence
from shared.algorithm_schema import OnPolicyDistillationSection


class OnPolicyDistillation(PolicyGradient[OnPolicyDistillationSection]):
    """The actor's loss on advantages from a teacher."""

    def __init__(self, actor: ActorOptions, rewards: RewardOptions, n_updates: int, coef: float, gamma: float) -> None:
        super().__init__(actor, rewards, n_updates)
        self._coef, self._gamma = coef, gamma

    @classmethod
    def of(cls, section: OnPolicyDistillationSection, n_updates: int, max_response_length: int) -> Self:
        actor, rewards = ActorOptions.of(section), RewardOptions.of(section)
        return cls(actor, rewards, n_updates, section.teacher_kl_coef, section.gamma)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, teacher=True)

    def advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        of = partial(returns_to_go, gamma=self._gamma)
        return [
            [each_sequence(e.trajectory, of, penalty(e, self._coef), sampled(e)) for e in group] for group in groups
        ]
