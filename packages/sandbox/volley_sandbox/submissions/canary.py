"""Verdicts on versions of environments, from their live episodes.

A canary is promoted when every turn that its episodes reach has enough observations without excess failures, or when
enough episodes have ended. A turn's failures are counted relative to the episodes that reached it (see
`shared.failure_rates`). Eight episodes without a failure only show, with 95 % confidence, that fewer than a third fail.
Therefore a promoted version stays under observation, and is rolled back if it fails more often than the version before
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from services.env.episode_slots import EpisodeCall
from shared.failure_rates import TOLERATED, FailureRates, TurnCount

MIN_EPISODES = 8
"""Episodes that must end before a canary is promoted, and must reach a turn before the turn is judged."""
MAX_EPISODES = 64
"""Ended episodes after which a canary is decided even if few of them reached some turn."""
MAX_P95_S = 10.0
"""Upper bound on the 95th percentile of a call's duration, in seconds."""
WATCHED_EPISODES = 1000
"""Ended episodes after a promotion during which the version may be rolled back."""
_CERTAIN = 0.01
_MAX_CALLS = 1000


@dataclass(slots=True)
class LiveRecord:
    """Observations of one version since it became a canary, or since the service started."""

    n_ended: int = 0
    rates: FailureRates = field(default_factory=FailureRates)
    calls_s: list[float] = field(default_factory=list[float])
    failed: dict[tuple[object, ...], None] = field(default_factory=dict[tuple[object, ...], None])

    def called(self, call: EpisodeCall) -> None:
        """Count a call. Repeated failures of one sample at one turn count once."""
        if len(self.calls_s) < _MAX_CALLS:
            self.calls_s.append(call.seconds)
        key = (*call.sample, call.turn)
        if call.failure is not None and key in self.failed:
            return
        if call.failure is not None:
            self.failed[key] = None
            if len(self.failed) > _MAX_CALLS:
                del self.failed[next(iter(self.failed))]
        self.rates.called(call.turn, call.failure.detail if call.failure is not None else None)

    def ended(self) -> None:
        self.n_ended += 1

    @property
    def verdict(self) -> tuple[bool, str] | None:
        """Verdict on a canary with its reason; None while there are too few observations."""
        if (turn := self.rates.suspect(_CERTAIN)) is not None:
            return False, f"{self.n_ended} live episodes: {self.rates.format_turn(turn)}"
        if self.n_ended < MIN_EPISODES:
            return None
        p95_s = quantiles(self.calls_s, n=20, method="inclusive")[-1] if len(self.calls_s) > 1 else 0.0
        if p95_s > MAX_P95_S:
            return False, f"one call in 20 took more than {p95_s:.1f} s ({MAX_P95_S:g} s is the bound)"
        thin = [turn for turn, count in self._turns() if count.reached < MIN_EPISODES]
        unclear = [turn for turn, count in self._turns() if count.failed > TOLERATED * count.reached]
        if self.n_ended < MAX_EPISODES and (thin or unclear):
            return None
        if unclear:
            return False, f"{self.n_ended} live episodes: {self.rates.format_turn(unclear[0])}; too few to clear it"
        summary = f"{self.n_ended} live episodes, {self.rates.n_failed} failed, 19 of 20 calls below {p95_s:.3f} s"
        return True, summary + (f"; fewer than {MIN_EPISODES} reached turn {thin[0]}" if thin else "")

    def regression(self, before: LiveRecord | None) -> str | None:
        """Reason to roll back a promoted version: it fails more often than the one before it.

        None if it does not, or is no longer observed.

        Args:
            before: record of the earlier version, None if there is none.
        """
        if self.n_ended > WATCHED_EPISODES:
            return None
        turn = self.rates.suspect(than=before.rates if before is not None else None)
        return self.rates.format_turn(turn) if turn is not None else None

    @property
    def trouble(self) -> str | None:
        """Description of its excess failures; None if there are none."""
        turn = self.rates.suspect()
        return self.rates.format_turn(turn) if turn is not None else None

    def _turns(self) -> Sequence[tuple[int, TurnCount]]:
        return sorted(self.rates.turns.items())
