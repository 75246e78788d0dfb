"""Dr. GRPO (arXiv:2503.20783): GRPO without its two biases. The advantage is not divided by the standard deviation,

    A_i = r_i - mean(r)

so tasks of which nearly all or nearly no episodes succeed weigh no more than others; and the loss is the sum over
tokens divided by a constant (`sequence-mean-token-scale`), so a long wrong answer is no cheaper than a short one.
"""

from __future__ import annotations

from services.trainer.algorithms.terms.policy_gradient import GroupRelative
from shared.algorithm_schema import DrGrpoSection


class DrGrpo(GroupRelative[DrGrpoSection]):
    """GRPO without the division by the standard deviation."""

    estimator = "drgrpo"
