"""Dr. GRPO (arXiv:2503.20783): GRPO without two biases. The advantage is not divided by the standard deviation,

    A_i = r_i - mean(r)

so tasks that nearly always or nearly never succeed weigh no more than others; and the sum over tokens is divided by a
constant (`sequence-mean-token-scale`), so a long wrong answer costs no less per token than a short one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.algorithms.terms.advantages import GroupRewards
from services.trainer.algorithms.terms.algorithm import EpisodeGroup
from services.trainer.algorithms.terms.policy_gradient import Clipped
from volley_algorithms.sections import DrGrpoSection


def centred(rewards: GroupRewards) -> np.ndarray:
    """Compute the advantages of a group, float64 [G]."""
    return rewards.in_units(rewards.r - rewards.r.mean())


class DrGrpo(Clipped[DrGrpoSection]):
    """GRPO without the division by the standard deviation."""

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        return self.within_groups(groups, centred)
