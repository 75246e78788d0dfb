"""Set aside environments whose groups keep failing, and retry them with one group after growing pauses.

The pause doubles with every failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_FIRST_S, _LONGEST_S = 15.0, 240.0
_MOST = 512


@dataclass(slots=True)
class _Trial:
    due_at: float
    wait_s: float
    sent_at: float | None = None
    """Time at which its trial group was scheduled; None without one."""
    from_ticket: int = 0
    """First ticket that may be the trial group."""
    back_at: float | None = None


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Results to apply to the mixture: `failing` environments to set aside, and those that `recovered`."""

    failing: Mapping[str, str]
    recovered: frozenset[str]


class Suspensions:
    """Suspensions of a run. Args: clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trials: dict[str, _Trial] = {}
        self._failing: dict[str, str] = {}
        self._recovered: set[str] = set()

    @property
    def failing(self) -> Mapping[str, str]:
        """Environments to set aside that are still played."""
        return self._failing

    def taken(self) -> Verdicts:
        """Take the results since the last call."""
        verdicts = Verdicts(self._failing, frozenset(self._recovered))
        self._failing, self._recovered = {}, set()
        return verdicts

    def put_back(self, verdicts: Verdicts) -> None:
        """Put back results that could not be applied."""
        self._failing = {**verdicts.failing, **self._failing}
        self._recovered |= verdicts.recovered - self._failing.keys()

    def fail(self, env: str, why: str) -> None:
        self._failing[env] = why
        self._recovered.discard(env)
        while len(self._trials) >= _MOST:
            del self._trials[next(iter(self._trials))]
        before, now = self._trials.get(env), self._clock()
        again = before is not None and before.back_at is not None and now - before.back_at < _LONGEST_S
        wait_s = min(_LONGEST_S, 2 * before.wait_s) if before is not None and again else _FIRST_S
        self._trials[env] = _Trial(now + wait_s, wait_s)

    def due(self, suspended: Iterable[str]) -> list[str]:
        """Return the environments to retry now, including those whose trial has not ended for long.

        An environment that was set aside before this process started waits from now on.
        """
        now = self._clock()
        found = [(env, self._trials.setdefault(env, _Trial(now + _FIRST_S, _FIRST_S))) for env in suspended]
        return [env for env, one in found if (one.due_at if one.sent_at is None else one.sent_at + _LONGEST_S) <= now]

    def sent(self, envs: Iterable[str], from_ticket: int) -> None:
        """Record that they are retried by their first group from `from_ticket` on."""
        for env in envs:
            if env in self._trials:
                self._trials[env].sent_at, self._trials[env].from_ticket = self._clock(), from_ticket

    def ended(self, env: str, *, failed: bool, ticket: int) -> bool:
        """Record the end of a ticket's group; return True if it was a trial.

        A group that started before the trial was scheduled may be the trial, if its environment was looked up only
        afterwards.
        """
        trial = self._trials.get(env)
        if trial is None or trial.sent_at is None or ticket < trial.from_ticket:
            return False
        now = self._clock()
        trial.sent_at = None
        if failed:
            trial.wait_s = min(_LONGEST_S, 2 * trial.wait_s)
            trial.due_at = now + trial.wait_s
        else:
            trial.back_at = now
            self._recovered.add(env)
        return True
