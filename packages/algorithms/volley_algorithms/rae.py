"""RAE (role-conditioned advantage estimation, SPIRAL, arXiv:2506.24119), for games that a policy plays against itself.

REINFORCE with a moving average as baseline, one for each environment and each seat, because a seat may be better off
than another. For the reward r of each episode, in the order of the step,

    A = r - b,    b <- decay b + (1 - decay) r,    b = 0 at first

with `decay` 0.95 in the paper. The episode's own reward is not yet in its baseline, as in the authors' code
(spiral-rl/spiral), so A is unbiased. The loss is PPO's. `learner.baselines` keeps the averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.trainer.algorithms.terms.advantages import bounded
from services.trainer.algorithms.terms.algorithm import EpisodeGroup, EpisodeTokens, Needs
from services.trainer.algorithms.terms.policy_gradient import Clipped, sampled
from volley_algorithms.sections import RaeSection


class Rae(Clipped[RaeSection]):
    """PPO's loss on rewards without their seat's average."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, baseline_decay=self.section.decay)

    def compute_advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        return [[_above_baseline(episode) for episode in group] for group in groups]


def _above_baseline(episode: EpisodeTokens) -> np.ndarray:
    baseline = next(iter(episode.baselines.values()), 0.0)
    return bounded((episode.trajectory.reward - baseline) * sampled(episode))
