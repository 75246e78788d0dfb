"""Plain values of Tunix's learner. Imports no Tunix."""

from __future__ import annotations

from dataclasses import dataclass

from services.trainer.algorithms.terms.importance import Correction
from shared.algorithm_base import ClippedSection
from shared.algorithm_schema import PpoSection


@dataclass(frozen=True, slots=True)
class TunixOptions:
    """Options of Tunix's losses.

    `n_micro` is the number of micro-batches that make a step.
    """

    section: ClippedSection
    temperature: float
    n_micro: int
    n_iterations: int
    num_generations: int

    @property
    def correction(self) -> Correction:
        return Correction(self.section.sampler_is, self.section.sampler_is_threshold)

    @property
    def loss_name(self) -> str:
        """Name of the loss in Tunix's registry."""
        return "ppo" if isinstance(self.section, PpoSection) else "grpo"
