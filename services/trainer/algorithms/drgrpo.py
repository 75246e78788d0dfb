"""Dr. GRPO (arXiv:2503.20783): GRPO without two biases. The advantage is not divided by the standard deviation,

    A_i = r_i - mean(r)

so tasks that nearly always or nearly never succeed weigh no more than others; and the sum over tokens is divided by a
constant (`sequence-mean-token-scale`), so a long wrong answer costs no less per token than a short one.
"""

from __future__ import annotations

from services.trainer.algorithms.terms.policy_gradient import GroupRelative
from shared.algorithm_schema import DrGrpoSection


class DrGrpo(GroupRelative[DrGrpoSection]):
    """GRPO without the division by the standard deviation."""

    estimator = "drgrpo"
