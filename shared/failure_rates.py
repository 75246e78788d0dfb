"""Failed attempts at episodes by turn, relative to the attempts that reached that turn.

An attempt that ended before a turn says nothing about that turn: a version that raises at turn 3 may fail in 2 of 50
episodes and yet in all that got that far. If failures depend on what the model says, the remaining episodes are a
biased sample of its answers, and so is the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOLERATED = 0.05
"""Share of the attempts reaching a turn that may fail there."""
CERTAIN = 0.001
"""Significance level: the share counts as exceeded if this many failures were less probable at the tolerated share."""
_ENOUGH, _MOST_TOLERATED = 20, 0.5
_WINDOW = 500
_MOST_TURNS = 32
_MAX_TEXT = 200


@dataclass(slots=True)
class TurnCount:
    """Attempts that reached a turn and attempts that failed there, with the sums of their rewards so far."""

    reached: int = 0
    failed: int = 0
    reward_reached: float = 0.0
    reward_failed: float = 0.0
    last: str = ""

    @property
    def share(self) -> float:
        return self.failed / self.reached if self.reached else 0.0

    @property
    def tolerated(self) -> float:
        """The share that another version may have: this version's, if enough attempts show it."""
        return max(TOLERATED, min(self.share, _MOST_TOLERATED)) if self.reached >= _ENOUGH else TOLERATED

    def exceeds(self, tolerated: float, certain: float) -> bool:
        """True if significantly more than the tolerated share fail; at least two failures are required."""
        return self.failed >= 2 and tail(self.reached, self.failed, tolerated) < certain

    def halve(self) -> None:
        self.reached, self.failed = (self.reached + 1) // 2, self.failed // 2
        self.reward_reached, self.reward_failed = self.reward_reached / 2, self.reward_failed / 2


@dataclass(slots=True)
class FailureRates:
    """Failure counts of one version of an environment; turn 0 is the reset.

    Counts are halved after 1,000 attempts, so shares describe the last 500 to 1,000. `n_failed` of `n_begun` attempts
    failed in all.
    """

    turns: dict[int, TurnCount] = field(default_factory=dict[int, TurnCount])
    n_begun: int = 0
    n_failed: int = 0

    def called(self, turn: int, failure: str | None = None, reward: float = 0.0) -> None:
        """Count a turn that was answered or failed. Args: reward: of the attempt so far."""
        self.n_begun += turn == 0
        if turn == 0 and 0 in self.turns and self.turns[0].reached >= 2 * _WINDOW:
            for count in self.turns.values():
                count.halve()
        count = self.turns.setdefault(min(turn, _MOST_TURNS), TurnCount())
        count.reached += 1
        count.reward_reached += reward
        if failure is not None:
            count.failed += 1
            count.reward_failed += reward
            count.last = "".join(c if c.isprintable() else " " for c in failure[: 2 * _MAX_TEXT]).strip()[:_MAX_TEXT]
            self.n_failed += 1

    def suspect(self, certain: float = CERTAIN, than: FailureRates | None = None) -> int | None:
        """Return the first turn that fails too often, or None.

        If only all turns together fail too often, return the turn with the most failures.

        Args: than: another version, whose shares, up to a half, are tolerated if at least 20 attempts show them.
        """
        for turn, count in sorted(self.turns.items()):
            usual = than.turns.get(turn, TurnCount()) if than is not None else TurnCount()
            if count.exceeds(usual.tolerated, certain):
                return turn
        usual = than.whole if than is not None else TurnCount()
        if self.whole.exceeds(usual.tolerated, certain):
            return max(self.turns, key=lambda turn: self.turns[turn].failed)
        return None

    @property
    def whole(self) -> TurnCount:
        """Attempts that started, and attempts that failed at any turn."""
        began = self.turns[0].reached if 0 in self.turns else 0
        failed = sum(count.failed for count in self.turns.values())
        return TurnCount(max(began, failed), failed)

    def format_turn(self, turn: int) -> str:
        """Describe the failures at a turn in one sentence."""
        count = self.turns[turn]
        where = "in reset" if turn == 0 else f"at turn {turn}" + (" or later" if turn == _MOST_TURNS else "")
        text = f"{where}, {count.failed} of the {count.reached} attempts that reached it failed"
        passed = count.reached - count.failed
        if passed and count.failed:
            failed_mean = count.reward_failed / count.failed
            passed_mean = (count.reward_reached - count.reward_failed) / passed
            if abs(failed_mean - passed_mean) > 1e-9:
                text += f" (mean reward so far {failed_mean:.3g}, of the others {passed_mean:.3g})"
        if (whole := self.whole).failed > count.failed:
            text += f"; {whole.failed} of {whole.reached} in all"
        return f"{text}, the last: {count.last}" if count.last else text

    def describe(self) -> list[Mapping[str, float | int]]:
        """Return a row for each turn at which attempts failed."""
        return [
            {"turn": turn, "reached": count.reached, "failed": count.failed}
            for turn, count in sorted(self.turns.items())
            if count.failed
        ]


def tail(n: int, least: int, share: float) -> float:
    """Return P(X >= least) for a binomial X of n trials with probability `share`."""
    term = (1.0 - share) ** n
    below = 0.0
    for k in range(least):
        below += term
        term *= (n - k) / (k + 1) * share / (1.0 - share)
    return max(0.0, 1.0 - below)
