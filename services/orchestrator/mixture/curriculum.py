"""A curriculum over the environments of a mixture: more groups of what there is most to learn from.

What a group has to teach is the variance of its outcomes: where all of its samples succeed, or none does, every
advantage is zero. Its estimate p(1 - p), averaged over the last groups of an environment, is that environment's
learnability: A. Rutherford et al., "No Regrets: Investigating and Improving Regret Approximations for Curriculum
Discovery", 2024; T. Foster and J. Foerster, "Learning to Reason at the Frontier of Learnability", 2025.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.orchestrator.tallies import EnvironmentTallies
from shared.schema import CurriculumConfig

_LEAST_GROUPS = 8
"""An environment of which fewer groups are known keeps the factor it has."""
_LEAST_MOVE = 0.05
"""Factors are left as they are until one would move as far as this: every change is a line on disk."""


class Curriculum:
    """By what the weights of a mixture are multiplied. Args: tallies: of the groups that this process has published."""

    def __init__(self, config: CurriculumConfig, tallies: EnvironmentTallies) -> None:
        self._config, self._tallies = config, tallies
        self._next = tallies.n_groups + config.every_groups

    def judged(self) -> dict[str, float]:
        """Every so many groups: from `floor` (nothing to learn) to 1 (half of all samples succeed, in every group), by
        environment; those of which too little is known are left out. To be followed by `settled`.
        """
        if self._tallies.n_groups < self._next:
            return {}
        return {
            env: self._factor(self._tallies[env].learnability)
            for env in self._tallies.names()
            if len(self._tallies[env].recent) >= _LEAST_GROUPS
        }

    def settled(self) -> None:
        """What was judged is in force, or changes nothing: the next time is so many groups from now."""
        if self._tallies.n_groups >= self._next:
            self._next = self._tallies.n_groups + self._config.every_groups

    def _factor(self, learnability: float) -> float:
        return max(self._config.floor, round(min(1.0, 4.0 * learnability), 2))


def factors_after(last: Mapping[str, float], judged: Mapping[str, float], envs: Iterable[str]) -> dict[str, float]:
    """The factors that are not 1, of these environments: as judged, if that moves one of them far enough."""
    before = {env: last.get(env, 1.0) for env in envs}
    after = {env: judged.get(env, factor) for env, factor in before.items()}
    moved = any(round(abs(after[env] - before[env]), 6) >= _LEAST_MOVE for env in after)
    return {env: factor for env, factor in (after if moved else before).items() if factor != 1.0}
