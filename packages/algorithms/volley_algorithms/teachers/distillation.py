"""On-policy distillation: a teacher scores every token that the student sampled. The advantage

    A_t = - coef * (log p_student(x_t) - log p_teacher(x_t))

gives the gradient of the reverse KL(student || teacher) of each token's distribution, estimated from the one sampled
token (k1): the estimator of MiniLLM (arXiv:2306.08543, its single-step part), of GKD with on-policy data and reverse KL
(arXiv:2306.13649), and of Thinking Machines' "On-Policy Distillation" (2025). The teacher scores an episode during
rollout, so its log-probabilities are part of the data: neither a step nor a replay calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from services.trainer.algorithms.terms.actor import TokenMasks
from services.trainer.algorithms.terms.algorithm import Algorithm, EpisodeGroup, EpisodeTokens, Needs
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch
from shared.types import Group, Trajectory

_MOST_NATS = 20.0


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


def reverse_kl(trajectory: Trajectory, old: np.ndarray | None = None) -> np.ndarray:
    """Compute log p(student) - log p(teacher) at sampled tokens, 0 elsewhere; float64 [N].

    The student is the sampling policy, as the trainer computes it (`old`, float32 [N]) if that is known. Differences
    are clipped to ±20 nats, so no single token that the teacher nearly excludes dominates a step. All are 0 if the
    teacher has scored nothing, because it lacked information (`teacher_view`).
    """
    if trajectory.teacher_logprobs is None:
        return np.zeros(trajectory.n_stored)
    student = trajectory.stored("logprobs") if old is None else old
    difference = student.astype(np.float64) - trajectory.stored("teacher_logprobs").astype(np.float64)
    return np.where(trajectory.stored("loss_mask"), np.clip(difference, -_MOST_NATS, _MOST_NATS), 0.0)


def of_teacher(groups: Sequence[Group]) -> dict[str, float]:
    """Compute `teacher_kl`: reverse KL from the sampling policy to the teacher, mean over sampled tokens (k1, nats).

    With a privileged teacher also `teacher_lacks/NAME`: the number of episodes that it did not score because that
    information was missing. Empty without a teacher.
    """
    views = [t.teacher_view for group in groups for t in group.trajectories if t.teacher_view is not None]
    lacks = Counter(f"teacher_lacks/{name}" for view in views for name in view.lacks)
    shown = [t for group in groups for t in group.trajectories if t.teacher_logprobs is not None]
    n_tokens = sum(t.n_sampled for t in shown)
    kl = {"teacher_kl": float(sum(reverse_kl(t).sum() for t in shown)) / n_tokens} if n_tokens else {}
    return {**kl, **dict(sorted(lacks.items()))}
