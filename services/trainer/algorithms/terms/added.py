"""Teachers, seats and the user's own rules in the trainer's algorithms, which an installed package computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shared import packages
from shared.algorithm_base import PolicyGradientSection
from shared.group_rules import GroupRule
from shared.types import Group, Trajectory

if TYPE_CHECKING:  # JAX
    from services.trainer.algorithms.terms.algorithm import Algorithm, EpisodeGroup
    from services.trainer.algorithms.terms.rewards import TokenRewards


class AddedTerms(Protocol):
    """The part `trainer.algorithms`. A rule is the text that a configuration holds; it raises RuleFailed."""

    def check_rules(self, section: PolicyGradientSection, keeps: str | None) -> None:
        """Try an algorithm's rules and the filter `keeps` on made data. Raises ConfigError."""
        ...

    def credit(self, rule: str) -> Callable[[Trajectory, TokenRewards], TokenRewards]: ...

    def group_filter(self, rule: str) -> GroupRule: ...

    def for_each_seat(
        self, groups: Sequence[EpisodeGroup], compute: Callable[[Sequence[EpisodeGroup]], list[list[np.ndarray]]]
    ) -> list[list[np.ndarray]]:
        """Compute float64 [N] for each episode; the seats of a game are compared apart."""
        ...

    def taught(self, made: Algorithm, coef: float) -> Algorithm:
        """Add a teacher to the algorithm."""
        ...

    def teacher_metrics(self, groups: Sequence[Group]) -> dict[str, float]: ...


def added_terms() -> AddedTerms:
    """Raises ConfigError if no package brings them."""
    return packages.part("trainer.algorithms")
