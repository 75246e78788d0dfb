"""Algorithms that leave the estimator of advantages to `advantage_estimator`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from services.trainer.algorithms.grpo import standardized
from services.trainer.algorithms.terms.advantages import Estimate
from services.trainer.algorithms.terms.algorithm import EpisodeGroup
from services.trainer.algorithms.terms.policy_gradient import PolicyGradient
from volley_algorithms.drgrpo import centred
from volley_algorithms.maxrl import by_mean
from volley_algorithms.rloo import leave_one_out
from volley_algorithms.sections import EstimatedSection

ESTIMATORS: Mapping[str, Estimate] = {
    "grpo": standardized,
    "drgrpo": centred,
    "rloo": leave_one_out,
    "maxrl": by_mean,
}


class Estimated[S: EstimatedSection](PolicyGradient[S]):
    """Advantages of a group by the estimator that the section names."""

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        return self.within_groups(groups, ESTIMATORS[self.section.advantage_estimator])
