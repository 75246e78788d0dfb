"""Curriculum over the environments of a mixture: more groups where there is most to learn.

A group's learning signal is the variance of its outcomes: if all or none of its samples succeed, every advantage is
zero. Its estimate p(1 - p), averaged over an environment's last groups, is the environment's learnability: A.
Rutherford et al., "No Regrets: Investigating and Improving Regret Approximations for Curriculum Discovery", 2024; T.
Foster and J. Foerster, "Learning to Reason at the Frontier of Learnability", 2025.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.orchestrator.tallies import EnvironmentTallies
from shared.data_schema import CurriculumConfig

_LEAST_GROUPS = 8
"""Environments with fewer known groups keep their factor."""
_LEAST_MOVE = 0.05
"""Smallest change of a factor that is applied: every change is a line on disk."""


class Curriculum:
    """Factors of a mixture's weights. Args: tallies: of the groups that this process has published."""

    def __init__(self, config: CurriculumConfig, tallies: EnvironmentTallies) -> None:
        self._config, self._tallies = config, tallies
        self._next = tallies.n_groups + config.every_groups

    def judged(self) -> dict[str, float]:
        """Return new factors by environment every `every_groups` groups, else nothing; call `settled` afterwards.

        A factor goes from `floor` (nothing to learn) to 1 (half of all samples succeed, in every group). Environments
        with too few groups are left out.
        """
        if self._tallies.n_groups < self._next:
            return {}
        return {
            env: self._factor(self._tallies[env].learnability)
            for env in self._tallies.names()
            if len(self._tallies[env].recent) >= _LEAST_GROUPS
        }

    def settled(self) -> None:
        """Mark the factors as applied: the next ones are due `every_groups` groups from now."""
        if self._tallies.n_groups >= self._next:
            self._next = self._tallies.n_groups + self._config.every_groups

    def _factor(self, learnability: float) -> float:
        return max(self._config.floor, round(min(1.0, 4.0 * learnability), 2))


def factors_after(last: Mapping[str, float], judged: Mapping[str, float], envs: Iterable[str]) -> dict[str, float]:
    """Return these environments' factors other than 1: the judged ones if one moves far enough, else the last."""
    before = {env: last.get(env, 1.0) for env in envs}
    after = {env: judged.get(env, factor) for env, factor in before.items()}
    moved = any(round(abs(after[env] - before[env]), 6) >= _LEAST_MOVE for env in after)
    return {env: factor for env, factor in (after if moved else before).items() if factor != 1.0}
