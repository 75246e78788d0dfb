"""Protocol of an algorithm: token values that it needs, advantages, and a loss.

A new algorithm is a module of a package, with a section of the configuration and an entry point of `volley.algorithms`;
those of the core are rows of `registry.OWN`. A new statistic is one more entry in the mapping that a loss returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np

from services.trainer.algorithms.terms.actor import TokenMasks
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch
from shared.types import Trajectory


@dataclass(frozen=True, slots=True)
class Needs:
    """Inputs that an algorithm needs.

    Computed for each token before advantages and loss: log-probabilities of the frozen `reference`, those of the policy
    at the start of the step (`old`), and the critic's `values`. `entropy`: the loss needs the gradient of the policy's
    entropy. `teacher`: trajectories need a teacher's log-probabilities. `observations`: the loss needs the weights of
    the environment's tokens (`Batch.observed`). `staleness`: the loss needs that of each token (`Batch.staleness`).
    `baseline_decay`: advantages need moving averages of rewards, with this decay.
    """

    reference: bool = False
    old: bool = False
    values: bool = False
    entropy: bool = False
    teacher: bool = False
    observations: bool = False
    staleness: bool = False
    baseline_decay: float | None = None


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """A trajectory that stores N tokens, and their values, float32 [N], 0 at tokens that were not sampled, or None.

    The tokens are those of `Trajectory.stored`: all sequences of the episode, each token once. `baselines` are the
    moving averages of rewards before the episode, by seat ("" without seats).
    """

    trajectory: Trajectory
    reference: np.ndarray | None = None
    old: np.ndarray | None = None
    values: np.ndarray | None = None
    baselines: Mapping[str, float] = field(default_factory=dict[str, float], kw_only=True)


type EpisodeGroup = Sequence[EpisodeTokens]
"""Episodes of one ticket."""


class Algorithm(Protocol):
    """An algorithm turns a step's episodes into advantages and a loss."""

    @property
    def needs(self) -> Needs: ...

    def counts(self, trajectory: Trajectory) -> bool:
        """True if the trajectory is in the loss. Otherwise it counts in no statistic of its group or step either."""
        ...

    def advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        """Compute float64 [N] for each episode of a step, finite in float32; 0 at tokens that were not sampled.

        All are 0 in an episode outside the loss.
        """
        ...

    def loss(self, scores: TokenScores, batch: Batch) -> tuple[jax.Array, Statistics]:
        """Compute loss, float32 scalar, and statistics of a micro-batch.

        The denominators are those of the step (`batch.weight`), so values and gradients of micro-batches add up.
        """
        ...

    def token_masks(self, scores: TokenScores, batch: Batch) -> TokenMasks:
        """Return how `loss` treats each token of a micro-batch."""
        ...


class ActorCritic(Algorithm, Protocol):
    """An algorithm whose advantages use a critic, which is trained along with the policy."""

    def returns(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        """Compute the critic's targets, float64 [N] for each episode; 0 at tokens that were not sampled."""
        ...

    def value_loss(self, values: jax.Array, batch: Batch) -> tuple[jax.Array, Statistics]:
        """Compute loss and statistics as `loss` does, from the critic's present values, float32 [B, T]."""
        ...
