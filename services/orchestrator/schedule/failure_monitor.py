"""Suspend an environment whose groups only fail, or end the run if it needs that environment.

Otherwise the run would void tickets forever.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from services.orchestrator.status import RunStatus
from shared.errors import VolleyError
from shared.types import Group

_MOST_IN_A_ROW, _MOST_BESIDE = 8, 3
_LOOKED_AT, _MOST_OF_THEM = 32, 16
"""Groups looked at, and failures among them that set an environment aside: the rest is too biased."""


class EnvironmentSuspender(Protocol):
    """Mixture methods that `FailureMonitor` uses."""

    def set_aside(self, env: str, why: str) -> bool:
        """Set an environment aside; return False if the run needs it."""
        ...

    def ended(self, env: str, *, failed: bool, ticket: int) -> None:
        """Record the end of a ticket's group."""
        ...


class OnlyEnvironment:
    """`EnvironmentSuspender` for a run with one environment."""

    def set_aside(self, env: str, why: str) -> bool:
        return False

    def ended(self, env: str, *, failed: bool, ticket: int) -> None: ...


@dataclass(slots=True)
class _Streak:
    """Failures in a row: all, and those not caused by the same event as an earlier one."""

    failed: int = 0
    events: int = 0
    failed_at: float = 0.0


class FailureMonitor:
    """Counts failures by environment.

    Setting one aside for a while costs little, so every failed group counts towards it. For the end of the run, groups
    that one event broke together count once: a group counts if it started after the last counted one had failed.
    """

    def __init__(self, status: RunStatus, mixture: EnvironmentSuspender) -> None:
        self._status, self._mixture = status, mixture
        self._streaks: dict[str, _Streak] = {}
        self._last: dict[str, deque[bool]] = {}

    def count(self, group: Group, started_at: float) -> None:
        """Count a group. Raises VolleyError if an environment that the run needs only fails."""
        self._mixture.ended(group.env, failed=group.failure is not None, ticket=group.ticket)
        last = self._last.setdefault(group.env, deque(maxlen=_LOOKED_AT))
        last.append(group.failure is not None)
        if group.failure is None:
            self._streaks.pop(group.env, None)
            return
        streak = self._streaks.setdefault(group.env, _Streak())
        streak.failed += 1
        if started_at >= streak.failed_at:
            streak.events, streak.failed_at = streak.events + 1, time.monotonic()
        reason = self._status.by_env[group.env].last_failure or group.failure
        failures = f"{streak.failed} groups in a row" if streak.failed >= _MOST_BESIDE else ""
        if not failures and len(last) == _LOOKED_AT and sum(last) >= _MOST_OF_THEM:
            failures = f"{sum(last)} of the last {_LOOKED_AT} groups"
        if failures and self._mixture.set_aside(group.env, f"{failures} failed, the last with {reason}"):
            del self._streaks[group.env], self._last[group.env]
        elif streak.events >= _MOST_IN_A_ROW:
            raise VolleyError(
                f"{streak.events} groups in a row failed, the last with {reason}",
                "see the service's log for each cause",
            )
