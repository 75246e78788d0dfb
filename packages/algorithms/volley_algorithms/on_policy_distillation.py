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

import numpy as np

from services.trainer.algorithms.terms.advantages import returns_to_go
from services.trainer.algorithms.terms.algorithm import EpisodeGroup, Needs
from services.trainer.algorithms.terms.policy_gradient import Clipped, sampled
from services.trainer.algorithms.terms.rewards import each_sequence
from volley_algorithms.sections import OnPolicyDistillationSection
from volley_algorithms.teachers.distillation import penalty


class OnPolicyDistillation(Clipped[OnPolicyDistillationSection]):
    """The actor's loss on advantages from a teacher."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, teacher=True)

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        of, coef = partial(returns_to_go, gamma=self.section.gamma), self.section.teacher_kl_coef
        return [[each_sequence(e.trajectory, of, penalty(e, coef), sampled(e)) for e in group] for group in groups]
