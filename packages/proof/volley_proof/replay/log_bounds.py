"""End of a fork, which trains from another run's log: its last step, the log's end, or a too low effective share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.interfaces import TrainerBackend
from shared.types import WeightVersion


class LogBounds:
    """Bounds of a fork.

    Args:
        last: last step to train.
        least_share: bound of the effective share of the next step's groups, in [0, 1].
        is_exhausted: true once the buffer has every group of the log.

    """

    def __init__(
        self, backend: TrainerBackend, last: int, least_share: float, is_exhausted: Callable[[], bool]
    ) -> None:
        self._backend, self._last, self._least = backend, last, least_share
        self.is_exhausted = is_exhausted
        self._effective_share: float | None = None

    def ended(self, groups: Sequence[ReadyGroup], present: WeightVersion, is_exhausted: bool) -> str | None:
        """Return the reason why training ends before the next step; None if it goes on. Blocks.

        Args:
            groups: groups of the next step; none while they are not all here.
            present: version of the present weights.
        """
        if present.step >= self._last:
            return f"step {present.step} was asked for"
        if not groups:
            return "the log has no more groups" if is_exhausted else None
        self._effective_share = share = self._backend.effective_share(groups, present)
        if share >= self._least:
            return None
        return (
            f"the effective share of the groups of step {present.step + 1} is {share:.3f}, below {self._least:g}: the"
            " policy is too far from the one that sampled the log"
        )

    def of_line(self) -> dict[str, float | None]:
        """Return the fields of a line of metrics that are a fork's own, of the groups that `ended` last saw.

        No token of the log was sampled by the fork's present weights, which engine and trainer could be compared on.
        """
        current = ("logprob_abs_diff_current", "logprob_abs_diff_current_max")
        return {"effective_share": self._effective_share, **dict.fromkeys(current)}
