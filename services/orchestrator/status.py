"""Status of the run for people and programs: state, reason, rates, and waits. It makes no decisions."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from services.orchestrator import metrics
from services.orchestrator.tallies import EnvironmentTallies
from shared.errors import Party, VolleyError
from shared.run.waits import Wait
from shared.types import Group, Trajectory

type State = Literal["waiting", "running", "evaluating", "paused", "finished", "failed"]
_WINDOW_S = 30
_RECENT = 256  # episodes, for the mean duration


class RunStatus:
    """Status of a run. Args: clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: deque[tuple[int, int]] = deque()  # (second, tokens), one entry per second of the window
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._ended: tuple[State, str] | None = None
        self._moved_at = clock()
        self._waits: Counter[Party] = Counter()
        self._env_waits: Counter[str] = Counter()
        self.running = 0
        self.evaluating_step: int | None = None
        self.evaluated: tuple[int, int] | None = None
        """Progress of the present evaluation: tasks that have ended, and their total."""
        self.paused = False
        self.waiting: Wait | None = Wait("trainer", "the trainer has not opened the queue")
        self.disk: str | None = None
        self.refused = ""
        self.published = 0
        self.failed_groups = 0
        self.last_failure: str | None = None
        self.by_env = EnvironmentTallies()
        self.staleness: int | None = None

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Count one episode as running."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    @contextmanager
    def waits_on(self, party: Party, env: str = "") -> Iterator[None]:
        """Count one episode as waiting for a service. Args: env: environment that has to answer."""
        self._waits[party] += 1
        if env:
            self._env_waits[env] += 1
        try:
            yield
        finally:
            self._waits[party] -= 1
            if env:
                self._env_waits[env] -= 1

    @property
    def waits(self) -> dict[Party, int]:
        """Number of waiting episodes, by party."""
        return {party: n for party, n in self._waits.items() if n}

    @property
    def env_waits(self) -> dict[str, int]:
        """Number of episodes waiting for an answer, by environment."""
        self._env_waits += Counter()  # removes those at 0
        return dict(self._env_waits)

    @property
    def warnings(self) -> list[str]:
        """Sentences on environments whose attempts fail so often that training is biased."""
        found = [(env, self.by_env[env].failing) for env in self.by_env.names()]
        return [
            f"{env}: {why}. Failed attempts have no reward, so the remaining groups are a biased sample."
            for env, why in found
            if why
        ]

    def moved(self) -> None:
        """Record progress: a turn was sampled, an episode ended, a group was published, or the queue changed."""
        self._moved_at = self._clock()

    def quiet_s(self) -> float:
        """Return the seconds since the last progress."""
        return self._clock() - self._moved_at

    def ended(self, trajectory: Trajectory) -> None:
        self.moved()
        second = int(self._clock())
        if self._tokens and self._tokens[-1][0] == second:
            self._tokens[-1] = second, self._tokens[-1][1] + trajectory.n_sampled
        else:
            self._tokens.append((second, trajectory.n_sampled))
        self._forget(second)
        self._durations.append(trajectory.timings["total_s"])

    def turn_answered(self, env: str, turn: int, reward: float) -> None:
        """Count an answered turn. Args: turn: 0 is the reset; reward: of the attempt before this turn."""
        self.by_env[env].attempts.called(turn, None, reward)
        metrics.count_turn(self.by_env.versioned_label(env), turn, reward, "answered")

    def attempt_failed(self, env: str, turn: int, reward: float, error: VolleyError) -> None:
        """Count the turn that an attempt failed at; arguments as in `turn_answered`."""
        failure = f"{type(error).__name__}: {error}"
        self.by_env[env].attempts.called(turn, failure, reward)
        metrics.count_turn(self.by_env.versioned_label(env), turn, reward, "failed")

    def episode_failed(self, env: str, error: VolleyError) -> None:
        self.last_failure = self.by_env[env].last_failure = f"{type(error).__name__}: {error}"

    def group_published(self, group: Group, version: int) -> None:
        """Count a published group. Args: version: the queue's step at the time."""
        self.moved()
        self.published += 1
        if group.rule is not None:  # void, but its environment has not failed
            return
        self.by_env.published(group)
        if group.failure is None:
            self.staleness = max(0, version - group.oldest().step)
        else:
            self.failed_groups += 1

    def end(self, state: Literal["finished", "failed"], reason: str = "") -> None:
        """Set the final state of the run."""
        if self._ended is None:
            self._ended = (state, reason)

    @property
    def is_over(self) -> bool:
        return self._ended is not None

    def state(self, no_server: str | None) -> tuple[State, str]:
        """Return the state and its reason.

        `failed` is not final if the trainer has refused a step: it may be started again.

        Args:
            no_server: why no rollout server can be used, if so.
        """
        if self._ended is not None:
            return self._ended
        if self.refused:
            return "failed", self.refused
        if no_server is not None and (self.evaluating_step is not None or (self.running == 0 and self.waiting is None)):
            return "waiting", no_server
        if self.evaluating_step is not None:
            return "evaluating", f"held-out tasks at step {self.evaluating_step}" + (
                f"; {self.disk}" if self.disk else ""
            )
        if self.paused:
            return "paused", "on request"
        if self.running == 0 and self.waiting is not None:
            return "waiting", self.waiting.why
        return "running", ""

    def tokens_per_s(self) -> float:
        """Return the tokens of episodes that ended in the last 30 s, divided by that time."""
        self._forget(int(self._clock()))
        return sum(n for _, n in self._tokens) / _WINDOW_S

    def mean_episode_s(self) -> float | None:
        """Return the mean duration of the last 256 episodes, in seconds."""
        return sum(self._durations) / len(self._durations) if self._durations else None

    def _forget(self, second: int) -> None:
        while self._tokens and self._tokens[0][0] <= second - _WINDOW_S:
            self._tokens.popleft()
