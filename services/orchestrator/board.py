"""What the run is doing, for people and programs: state, reason, rates. Only counts; decides nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from shared.types import Group, Trajectory

type State = Literal["waiting", "running", "evaluating", "paused", "finished", "failed"]
_WINDOW_S = 30.0
_RECENT = 256  # episodes, for the mean duration


class Board:
    """Args: clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: deque[tuple[float, int]] = deque()
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._ended: tuple[State, str] | None = None
        self.running = 0
        self.evaluating_step: int | None = None
        self.paused = False
        self.waiting_for: str | None = "the trainer has not opened the queue"
        self.published = 0
        self.failed_groups = 0
        self.last_failure: str | None = None
        self.staleness: int | None = None

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Counts one episode as running."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def ended(self, trajectory: Trajectory) -> None:
        self._tokens.append((self._clock(), trajectory.n_sampled))
        self._durations.append(trajectory.timings["total_s"])

    def group_published(self, group: Group, version: int) -> None:
        """Args: version: the queue's step at the time."""
        self.published += 1
        if group.failure is None:
            self.staleness = max(0, version - group.oldest().step)
        else:
            self.failed_groups += 1

    def end(self, state: Literal["finished", "failed"], reason: str = "") -> None:
        """The last state of the run; nothing changes it any more."""
        if self._ended is None:
            self._ended = (state, reason)

    @property
    def is_over(self) -> bool:
        return self._ended is not None

    def state(self, no_server: str | None) -> tuple[State, str]:
        """State and its reason. Args: no_server: why no rollout server can be used, if so."""
        if self._ended is not None:
            return self._ended
        if no_server is not None and (self.evaluating_step is not None or (self.running == 0 and self.waiting_for is None)):
            return "waiting", no_server
        if self.evaluating_step is not None:
            return "evaluating", f"held-out tasks at step {self.evaluating_step}"
        if self.paused:
            return "paused", "on request"
        if self.running == 0 and self.waiting_for is not None:
            return "waiting", self.waiting_for
        return "running", ""

    def tokens_per_s(self) -> float:
        """Tokens of episodes that ended in the last 30 s, divided by that time."""
        now = self._clock()
        while self._tokens and self._tokens[0][0] < now - _WINDOW_S:
            self._tokens.popleft()
        return sum(n for _, n in self._tokens) / _WINDOW_S

    def mean_episode_s(self) -> float | None:
        """Mean duration of the last 256 episodes, in seconds."""
        return sum(self._durations) / len(self._durations) if self._durations else None
