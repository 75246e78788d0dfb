"""Whether a new version of an environment may have more than a small share of a live run: decided by how its first
episodes there fare.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import quantiles

from shared.errors import VolleyError

MIN_EPISODES = 8
"""Episodes that have to end before a canary is promoted."""
MAX_FAILURES = 3
"""So many failed episodes reject it at once; one of MIN_EPISODES does not."""
MAX_P95_S = 10.0
"""Seconds that 19 of 20 calls have to stay below."""
_MAX_CALLS = 1000


@dataclass(slots=True)
class Canary:
    """What was seen of one version since it became a canary."""

    n_ended: int = 0
    failures: list[str] = field(default_factory=list[str])
    calls_s: list[float] = field(default_factory=list[float])

    def stepped(self, seconds: float) -> None:
        if len(self.calls_s) < _MAX_CALLS:
            self.calls_s.append(seconds)

    def ended(self, failure: VolleyError | None) -> None:
        self.n_ended += 1
        if failure is not None:
            self.failures.append(failure.detail)

    @property
    def verdict(self) -> tuple[bool, str] | None:
        """Whether it is good, and why; None while too little was seen."""
        if len(self.failures) >= MAX_FAILURES:
            return False, f"{len(self.failures)} of {self.n_ended} live episodes failed, the last: {self.failures[-1]}"
        if self.n_ended < MIN_EPISODES:
            return None
        p95_s = quantiles(self.calls_s, n=20, method="inclusive")[-1] if len(self.calls_s) > 1 else 0.0
        if p95_s > MAX_P95_S:
            return False, f"one call in 20 took more than {p95_s:.1f} s ({MAX_P95_S:g} s is the bound)"
        told = f"{self.n_ended} live episodes, {len(self.failures)} failed, 19 of 20 calls below {p95_s:.3f} s"
        return True, told
