"""Outcomes of each environment's groups that this process generated."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shared.failure_rates import FailureRates
from shared.run.mixture import base_name
from shared.types import Group

_RECENT = 64  # groups, for the means
_MOST = 512
_MOST_LABELS = 32


class GroupScore(NamedTuple):
    """Mean reward and success rate of a group.

    `learnability` is the unbiased estimate of p(1 - p), the variance of success.
    """

    reward: float
    success: float
    learnability: float


@dataclass(slots=True)
class EnvironmentTally:
    """Counts of one environment: `recent` are the last groups, `attempts` those at episodes by turn."""

    attempts: FailureRates = field(default_factory=FailureRates)
    groups: int = 0
    failed: int = 0
    last_failure: str | None = None
    recent: deque[GroupScore] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def describe(self) -> dict[str, Any]:
        n = len(self.recent)
        return {
            "groups": self.groups,
            "groups_failed": self.failed,
            "attempts": self.attempts.n_begun,
            "attempts_failed": self.attempts.n_failed,
            "failing": self.failing,
            "reward_mean": sum(score.reward for score in self.recent) / n if n else None,
            "success": sum(score.success for score in self.recent) / n if n else None,
        }

    @property
    def failing(self) -> str | None:
        """Sentence on the turn at which too many attempts fail; None if there is none."""
        turn = self.attempts.suspect()
        return None if turn is None else self.attempts.format_turn(turn)


class EnvironmentTallies:
    """Tallies by environment; the oldest environments are dropped beyond a limit.

    `n_groups` counts all groups that have not failed.
    """

    def __init__(self) -> None:
        self.n_groups = 0
        self._by_env: dict[str, EnvironmentTally] = {}
        self._labels: set[str] = set()
        self._versioned: set[str] = set()

    def __getitem__(self, env: str) -> EnvironmentTally:
        if env not in self._by_env:
            self._by_env[env] = EnvironmentTally()
            if len(self._by_env) > _MOST:
                del self._by_env[next(iter(self._by_env))]
        return self._by_env[env]

    def names(self) -> list[str]:
        return list(self._by_env)

    def published(self, group: Group) -> None:
        tally = self[group.env]
        if group.failure is not None:
            tally.failed += 1
            return
        n, self.n_groups = len(group.trajectories), self.n_groups + 1
        tally.groups += 1
        success = sum(t.success for t in group.trajectories) / n
        learnability = success * (1.0 - success) * n / max(1, n - 1)
        tally.recent.append(GroupScore(sum(t.reward for t in group.trajectories) / n, success, learnability))

    def label(self, env: str) -> str:
        """Return a metric's label: the name without version, or `other` beyond the limit of names."""
        return _bounded(base_name(env), self._labels)

    def versioned_label(self, env: str) -> str:
        """Return a metric's label: the name with its version, or `other` beyond the limit of names."""
        return _bounded(env, self._versioned)


def _bounded(name: str, known: set[str]) -> str:
    if name not in known and len(known) >= _MOST_LABELS:
        return "other"
    known.add(name)
    return name
