"""Teachers, seats and the user's own rules for the trainer; each is imported when a run uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from services.trainer.algorithms.terms.added import AddedTerms
from shared.algorithm_base import PolicyGradientSection
from shared.group_rules import GroupRule
from shared.types import Group, Trajectory

if TYPE_CHECKING:
    from services.trainer.algorithms.terms.algorithm import Algorithm, EpisodeGroup
    from services.trainer.algorithms.terms.rewards import TokenRewards


class Terms(AddedTerms):
    """See `AddedTerms`."""

    def check_rules(self, section: PolicyGradientSection, keeps: str | None) -> None:
        from volley_algorithms.rules.checks import check_rules

        check_rules(section, keeps)

    def credit(self, rule: str) -> Callable[[Trajectory, TokenRewards], TokenRewards]:
        from volley_algorithms.rules.credit import credit_named

        return credit_named(rule)

    def group_filter(self, rule: str) -> GroupRule:
        from volley_algorithms.rules.of_groups import group_rule

        return group_rule(rule)

    def for_each_seat(
        self, groups: Sequence[EpisodeGroup], compute: Callable[[Sequence[EpisodeGroup]], list[list[np.ndarray]]]
    ) -> list[list[np.ndarray]]:
        from volley_algorithms.seats import for_each_seat

        return for_each_seat(groups, compute)

    def taught(self, made: Algorithm, coef: float) -> Algorithm:
        from volley_algorithms.teachers.distillation import Taught

        return Taught(made, coef)

    def teacher_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        from volley_algorithms.teachers.distillation import of_teacher

        return of_teacher(groups)


TERMS = Terms()
