"""When groups that fail mean more than that: an environment that only fails is set aside, and where it cannot be, the
run ends instead of voiding tickets for ever.
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
"""Groups of an environment, and failures among them, that set it aside: what still comes through is too biased."""


class SetsAside(Protocol):
    """The mixture's part."""

    def set_aside(self, env: str, why: str) -> bool:
        """Whether the run goes on without groups of this environment."""
        ...

    def ended(self, env: str, *, failed: bool, ticket: int) -> None:
        """The group of this ticket ended."""
        ...


class OnlyEnvironment:
    """`SetsAside` of a run that has one environment."""

    def set_aside(self, env: str, why: str) -> bool:
        return False

    def ended(self, env: str, *, failed: bool, ticket: int) -> None: ...


@dataclass(slots=True)
class _Streak:
    """Failures in a row: all, and those that no event broke together with an earlier one."""

    failed: int = 0
    events: int = 0
    failed_at: float = 0.0


class FailureJudge:
    """Counts per environment. It costs little to set one aside for a while, so every failed group counts for that. For
    the end of the run, groups that one event broke together count once: one counts if it began after the last that
    counted had failed.
    """

    def __init__(self, status: RunStatus, mixture: SetsAside) -> None:
        self._status, self._mixture = status, mixture
        self._streaks: dict[str, _Streak] = {}
        self._last: dict[str, deque[bool]] = {}

    def ended(self, group: Group, began: float) -> None:
        """Raises VolleyError when nothing but failures comes out of an environment that the run cannot do without."""
        self._mixture.ended(group.env, failed=group.failure is not None, ticket=group.ticket)
        last = self._last.setdefault(group.env, deque(maxlen=_LOOKED_AT))
        last.append(group.failure is not None)
        if group.failure is None:
            self._streaks.pop(group.env, None)
            return
        streak = self._streaks.setdefault(group.env, _Streak())
        streak.failed += 1
        if began >= streak.failed_at:
            streak.events, streak.failed_at = streak.events + 1, time.monotonic()
        reason = self._status.by_env[group.env].last_failure or group.failure
        told = f"{streak.failed} groups in a row" if streak.failed >= _MOST_BESIDE else ""
        if not told and len(last) == _LOOKED_AT and sum(last) >= _MOST_OF_THEM:
            told = f"{sum(last)} of the last {_LOOKED_AT} groups"
        if told and self._mixture.set_aside(group.env, f"{told} failed, the last with {reason}"):
            del self._streaks[group.env], self._last[group.env]
        elif streak.events >= _MOST_IN_A_ROW:
            raise VolleyError(
                f"{streak.events} groups in a row failed, the last with {reason}",
                "the service's log tells the cause of each",
            )
