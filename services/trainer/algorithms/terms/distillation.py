"""On-policy distillation: a teacher scores every token that the student sampled. The advantage

    A_t = - coef * (log p_student(x_t) - log p_teacher(x_t))

gives the gradient of the reverse KL(student || teacher) of each token's distribution, estimated from the one sampled
token (k1): the estimator of MiniLLM (arXiv:2306.08543, its single-step part), of GKD with on-policy data and reverse KL
(arXiv:2306.13649), and of Thinking Machines' "On-Policy Distillation" (2025). The teacher scores an episode during
rollout, so its log-probabilities are part of the data: neither a step nor a replay calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from services.trainer.algorithms.terms.actor import TokenMasks
from services.trainer.algorithms.terms.algorithm import Algorithm, EpisodeGroup, EpisodeTokens, Needs
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.rewards import reverse_kl
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch
from shared.types import Trajectory


class Taught:
    """Another algorithm with a teacher: subtracts `coef` times the reverse KL from each normalized advantage."""

    def __init__(self, inner: Algorithm, coef: float) -> None:
        self._inner, self._coef = inner, coef

    @property
    def needs(self) -> Needs:
        return replace(self._inner.needs, teacher=True)

    def counts(self, trajectory: Trajectory) -> bool:
        return self._inner.counts(trajectory)

    def advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        made = self._inner.advantages(groups)
        return [
            [a + penalty(e, self._coef) if self.counts(e.trajectory) else a for a, e in zip(one, group, strict=True)]
            for one, group in zip(made, groups, strict=True)
        ]

    def loss(self, scores: TokenScores, batch: Batch) -> tuple[jax.Array, Statistics]:
        return self._inner.loss(scores, batch)

    def token_masks(self, scores: TokenScores, batch: Batch) -> TokenMasks:
        return self._inner.token_masks(scores, batch)


def penalty(episode: EpisodeTokens, coef: float) -> np.ndarray:
    """Compute float64 [N]: the teacher's part of each token's advantage."""
    return -coef * reverse_kl(episode.trajectory, episode.old)
