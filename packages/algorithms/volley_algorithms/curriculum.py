"""Curriculum over the environments of a mixture: more groups where there is most to learn.

A group's learning signal is the variance of its outcomes: if all or none of its samples succeed, every advantage is
zero. Its estimate p(1 - p), averaged over an environment's last groups, is the environment's learnability: A.
Rutherford et al., "No Regrets: Investigating and Improving Regret Approximations for Curriculum Discovery", 2024; T.
Foster and J. Foerster, "Learning to Reason at the Frontier of Learnability", 2025.

A rule of the user's own gives other factors from the same inputs (`data.curriculum.custom`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from services.orchestrator.tallies import EnvironmentTallies, GroupScore
from shared import own_rules
from shared.data_schema import MAX_WEIGHT, CurriculumConfig
from shared.errors import RuleFailed
from shared.own_rules import OwnRule
from shared.rule_code import called, checked, in_thread, loaded

_LEAST_GROUPS = 8
"""Environments with fewer known groups keep their factor."""
_LEAST_MOVE, _LEAST_OWN_MOVE = 0.05, 1e-4
"""Smallest change of a factor that is applied, built in and by the user's rule: every change is a line on disk.

The user's is relative to the largest factor, if that is below 1.
"""
_WANTED = f"return a factor of 0 to {MAX_WEIGHT} for names in envs, above 0 for at least one"


@dataclass(frozen=True, slots=True)
class EnvironmentInputs:
    """An environment, and the last groups that this process has published of it: at most 64, oldest first.

    tickets: groups that the run has started of it, also before a restart.
    factor: its present factor.
    rewards, success: float64 [n], mean reward and success rate of each group.
    learnability: float64 [n], unbiased estimates of the variance of success.
    """

    tickets: int
    factor: float
    rewards: np.ndarray
    success: np.ndarray
    learnability: np.ndarray


@dataclass(frozen=True, slots=True)
class MixtureInputs:
    """All environments of the mixture, by name."""

    envs: Mapping[str, EnvironmentInputs]


type CurriculumRule = Callable[[MixtureInputs], dict[str, float]]
"""From the mixture to new factors of weights by environment; the others keep theirs."""


class EnvironmentCurriculum:
    """`Curriculum` of a run (part `curriculum`).

    Args:
        tallies: of the groups that this process has published.
        names: environments that the run starts with.

    Raises ConfigError for a rule of the user.
    """

    def __init__(self, config: CurriculumConfig, tallies: EnvironmentTallies, names: Iterable[str] = ()) -> None:
        self._config, self._tallies = config, tallies
        self._next = tallies.n_groups + config.every_groups
        self._rule = rule_of(config, names)

    @property
    def is_due(self) -> bool:
        """True every `every_groups` groups, until `settled`."""
        return self._tallies.n_groups >= self._next

    async def judged(self, factors: Mapping[str, float], tickets: Mapping[str, int]) -> dict[str, float]:
        """As `Curriculum.judged`."""
        envs = {env: _inputs(self._tallies[env].recent, n, factors.get(env, 1.0)) for env, n in tickets.items()}
        inputs = MixtureInputs(MappingProxyType(envs))
        return await in_thread(own_rules.CURRICULUM, lambda: self._rule(inputs))

    def after(self, last: Mapping[str, float], judged: Mapping[str, float], envs: Iterable[str]) -> dict[str, float]:
        """As `Curriculum.after`."""
        before = {env: last.get(env, 1.0) for env in envs}
        after = {env: judged.get(env, factor) for env, factor in before.items()}
        least = _LEAST_OWN_MOVE * min(1.0, max(after.values(), default=1.0)) if self._config.custom else _LEAST_MOVE
        moved = any(0 < abs(after[env] - before[env]) >= (1 - 1e-6) * least for env in after)
        return {env: factor for env, factor in (after if moved else before).items() if factor != 1.0}

    def settled(self) -> None:
        """As `Curriculum.settled`: the next factors are due `every_groups` groups from now."""
        if self.is_due:
            self._next = self._tallies.n_groups + self._config.every_groups


def rule_of(config: CurriculumConfig, names: Iterable[str]) -> CurriculumRule:
    """Return the rule of a configuration. Raises ConfigError for one of the user that fails on made inputs."""
    if config.custom is None:
        return partial(_by_learnability, floor=config.floor)
    return checked(own_rules.CURRICULUM, config.custom, curriculum_of, _made_inputs(tuple(names)))


def curriculum_of(rule: OwnRule) -> CurriculumRule:
    """Return the user's rule. Raises RuleFailed, as does the rule."""
    loaded(rule)

    def judged(mixture: MixtureInputs) -> dict[str, float]:
        made = called(rule, mixture)
        if not isinstance(made, Mapping):
            raise RuleFailed(f"{rule} returned {type(made).__name__}", _WANTED)
        if unknown := [name for name in made if name not in mixture.envs]:
            raise RuleFailed(f"{rule} returned a factor for {unknown[0]!r}", f"envs has {', '.join(mixture.envs)}")
        for env, factor in made.items():
            if not isinstance(factor, int | float | np.number) or not 0 <= factor <= MAX_WEIGHT:
                raise RuleFailed(f"{rule} returned {factor!r} for {env}", _WANTED)
        factors = {env: float(f"{float(factor):.6g}") for env, factor in made.items()}  # never 0 for a small one
        if not any(factors.get(env, one.factor) for env, one in mixture.envs.items()):
            raise RuleFailed(f"{rule} returned 0 for every environment", _WANTED)
        return factors

    return judged


def _by_learnability(mixture: MixtureInputs, floor: float) -> dict[str, float]:
    """Go from `floor` (nothing to learn) to 1 (half of all samples succeed, in every group).

    Environments with too few groups are left out.
    """
    return {
        env: max(floor, round(min(1.0, 4.0 * float(one.learnability.mean())), 2))
        for env, one in mixture.envs.items()
        if len(one.learnability) >= _LEAST_GROUPS
    }


def _inputs(recent: Sequence[GroupScore], tickets: int, factor: float) -> EnvironmentInputs:
    scores = np.array(recent, np.float64).reshape(-1, 3)
    scores.setflags(write=False)
    return EnvironmentInputs(tickets, factor, *scores.T)


def _made_inputs(names: Sequence[str]) -> list[MixtureInputs]:
    """Make mixtures of which nothing is known, little, and much: solved, hopeless, and each other."""
    made = list[MixtureInputs]()
    for n, success in ((0, ()), (1, (0.0,)), (20, (1.0,)), (64, (0.0,)), (64, (0.0, 0.25, 1.0))):
        scores = [GroupScore(s - 0.5, s, s * (1 - s)) for s in (*success, 0.5) for _ in range(n)][:n]
        envs = {name: _inputs(scores[i:], 10 * n + i, 1.0) for i, name in enumerate(names)}
        made.append(MixtureInputs(MappingProxyType(envs)))
    return made
