"""What every algorithm is: what it needs to know of the tokens, their advantages, and a loss.

A new algorithm is a module in algorithms/, a section of the configuration in shared/algorithm_schema.py, and a row of
`registry.ALGORITHMS` that joins both. A new statistic is a line where the loss gives its statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch
from shared.types import Trajectory


@dataclass(frozen=True, slots=True)
class Needs:
    """What is computed of each token before advantages and loss: log-probabilities of the frozen reference; those of
    the policy at the start of the step (`old`); the critic's `values`. `entropy`: the loss has a gradient of the
    policy's entropy. `teacher`: the trajectories come with a teacher's log-probabilities.
    """

    reference: bool = False
    old: bool = False
    values: bool = False
    entropy: bool = False
    teacher: bool = False


@dataclass(frozen=True, slots=True)
class Episode:
    """A trajectory of T tokens, and what was asked for: float32 [T] each, 0 where nothing was sampled, or None."""

    trajectory: Trajectory
    reference: np.ndarray | None = None
    old: np.ndarray | None = None
    values: np.ndarray | None = None


type EpisodeGroup = Sequence[Episode]
"""The episodes of one ticket."""


class Algorithm(Protocol):
    """How a step's episodes become a gradient."""

    @property
    def needs(self) -> Needs: ...

    def counts(self, trajectory: Trajectory) -> bool:
        """Whether its tokens are in the loss. Its reward counts among its group's in any case."""
        ...

    def advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        """float64 [T] for each episode of each group of one step, finite in float32; 0 where nothing was sampled."""
        ...

    def loss(self, scores: TokenScores, batch: Batch) -> tuple[jax.Array, Statistics]:
        """float32 scalar and statistics of a micro-batch. Its denominators are those of the step (`batch.weight`),
        so values and gradients of micro-batches add up.
        """
        ...


class ActorCritic(Algorithm, Protocol):
    """An algorithm whose advantages rest on the values of a critic, which is trained beside the policy."""

    def returns(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        """float64 [T] for each episode of each group: what its values should have been; 0 where nothing was sampled."""
        ...

    def value_loss(self, values: jax.Array, batch: Batch) -> tuple[jax.Array, Statistics]:
        """As `loss`, of the critic's present values float32 [B, T]."""
        ...
