"""What became of the groups of each environment, as far as this process has made them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from shared.run.mixture import base_name
from shared.types import Group

_RECENT = 64  # groups, for the means
_MOST = 512
_MOST_LABELS = 32


@dataclass(slots=True)
class EnvironmentTally:
    """`recent` are mean reward and share of successes of the last groups."""

    groups: int = 0
    failed: int = 0
    last_failure: str | None = None
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def describe(self) -> dict[str, Any]:
        n = len(self.recent)
        return {
            "groups": self.groups,
            "groups_failed": self.failed,
            "reward_mean": sum(reward for reward, _ in self.recent) / n if n else None,
            "success": sum(success for _, success in self.recent) / n if n else None,
        }


class EnvironmentTallies:
    """By name; those of the environments that were met longest ago are forgotten."""

    def __init__(self) -> None:
        self._by_env: dict[str, EnvironmentTally] = {}
        self._labels: set[str] = set()

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
        n = len(group.trajectories)
        tally.groups += 1
        tally.recent.append(
            (sum(t.reward for t in group.trajectories) / n, sum(t.success for t in group.trajectories) / n)
        )

    def label(self, env: str) -> str:
        """Of a metric: the name without version, and `other` beyond so many names."""
        name = base_name(env)
        if name not in self._labels and len(self._labels) >= _MOST_LABELS:
            return "other"
        self._labels.add(name)
        return name
