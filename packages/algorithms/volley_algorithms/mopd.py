"""MOPD (multi-teacher on-policy distillation, arXiv:2606.30406; MiMo-V2-Flash, arXiv:2601.02780, eq. 7 to 9): the
student plays the tasks of several environments, and the teacher of each grades every token. A token's loss is

    -stop_gradient(w) A log p,    w = p / q if low <= p / q <= high, else 0

with its probability p at the present policy and q at the sampler, and the advantage

    A = teacher_kl_coef (log p_teacher - log p) + outcome_coef A_outcome

where A_outcome, group-relative as `advantage_estimator` says, is from the episode's rewards. p in A is the policy's at
the start of the step. The orchestrator asks the teacher of the episode's environment: see
`services.orchestrator.teachers`.

The reports give no numbers for the bounds; the default is that of IcePop (arXiv:2510.18855), which they cite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.trainer.algorithms.terms.algorithm import EpisodeGroup, Needs
from services.trainer.algorithms.terms.surrogate import TokenLoss, Tokens
from volley_algorithms.estimators import Estimated
from volley_algorithms.masked import masked_reinforce
from volley_algorithms.sections import MopdSection
from volley_algorithms.teachers.distillation import penalty


class Mopd(Estimated[MopdSection]):
    """Masked REINFORCE on advantages from the teachers of several environments, and from rewards."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, teacher=True, old=True)

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        coef, outcome = self.section.teacher_kl_coef, self.section.outcome_coef
        taught = [[penalty(episode, coef) for episode in group] for group in groups]
        if not outcome:
            return taught
        of_rewards = super().compute_advantages(groups)
        return [
            [a + outcome * b for a, b in zip(one, other, strict=True)]
            for one, other in zip(taught, of_rewards, strict=True)
        ]

    def surrogate(self, tokens: Tokens) -> TokenLoss:
        low, high = self.section.ratio_bounds
        ratio = tokens.ratio()
        return masked_reinforce(tokens, ratio, (ratio >= low) & (ratio <= high))
