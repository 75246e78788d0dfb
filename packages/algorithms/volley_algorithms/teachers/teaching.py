"""Add a teacher's log-probabilities of the sampled tokens to finished episodes.

The teacher is asked before the group is published, so that its log-probabilities travel and are archived with the
group, and are computed once. If the teacher is unreachable or overloaded, episodes wait without a deadline and lose no
attempts: up to the concurrency limit they retry with increasing pauses; the others queue behind them. A failed answer
costs one of the episode's attempts; the same episode is then sent again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from services.orchestrator import metrics
from services.orchestrator.disk import retry_while_disk_full
from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.status import RunStatus
from shared.errors import RateLimited, StorageUnavailable, VolleyError
from shared.files.spending import SpendingStore
from shared.process import telemetry
from shared.teacher_view import TeacherLogprobs, TeacherPrompt, TeacherView
from shared.types import EpisodeSequence, Trajectory
from volley_algorithms.teachers.client import TeacherAway, TeacherRefused

_AGAIN_S, _MOST_S = 0.1, 30.0
"""Pause between two requests, in seconds: the first, and the longest."""
_WARN_EVERY_S = 60.0
_TEACHER = "teacher"
_KEY = "services.orchestrator.teacher"
_log = telemetry.Log("teacher")


class Teacher(Protocol):
    """`TeacherClient` method that `EpisodeTeaching` uses."""

    async def logprobs(self, ids: np.ndarray, start: int) -> TeacherLogprobs: ...


class TeachingBudget:
    """A teacher's budget; requests are counted on disk before they are sent.

    Args:
        key: of the teacher in the configuration.
    """

    def __init__(self, store: SpendingStore, max_requests: int | None, max_tokens: int | None, key: str = _KEY) -> None:
        self._store, self._limits, self._key = store, (max_requests, max_tokens), key
        self._name = _TEACHER if key == _KEY else key

    def spend(self, n_tokens: int) -> None:
        """Count a request; blocks. Raises TeacherRefused if the budget is used up, StorageUnavailable."""
        used_up = self._store.count_request(self._name, *self._limits)
        if used_up is not None:
            hint = f"raise {self._key}.{used_up.partition('=')[0]}"
            raise TeacherRefused(f"the budget of the teacher is used up: {used_up}", hint)
        self._store.count_tokens(self._name, n_tokens)


class TeachingByEnvironment:
    """Uses the teacher of the episode's environment (multi-teacher distillation).

    Args:
        choose: returns the key of an environment's teacher.
        teachers: by that key; one that is absent scores whole groups (see `privileged`).
    """

    def __init__(self, choose: Callable[[str], str | None], teachers: Mapping[str, EpisodeTeaching]) -> None:
        self._choose, self._teachers = choose, teachers

    async def add_logprobs(self, trajectory: Trajectory, budget: TokenBudget) -> Trajectory:
        """As `Teaching.add_logprobs`. Also raises TeacherRefused for an environment without a teacher."""
        key = self._choose(trajectory.env)
        if key is None:
            raise TeacherRefused(
                f"the environment {trajectory.env} has no teacher",
                "set services.orchestrator.teacher.url, or one for it in services.orchestrator.teachers",
            )
        teaching = self._teachers.get(key)
        return trajectory if teaching is None else await teaching.add_logprobs(trajectory, budget)


class EpisodeTeaching:
    """Adds the log-probabilities of one teacher.

    Args:
        max_concurrent: number of requests at once.
        budget: None for no limit.
    """

    def __init__(
        self, teacher: Teacher, status: RunStatus, max_concurrent: int, budget: TeachingBudget | None = None
    ) -> None:
        self._teacher, self._status, self._places = teacher, status, asyncio.Semaphore(max_concurrent)
        self._budget, self._warned_at = budget, -_WARN_EVERY_S

    async def add_logprobs(
        self, trajectory: Trajectory, budget: TokenBudget, view: TeacherView | None = None
    ) -> Trajectory:
        """As `Teaching.add_logprobs`. The teacher is shown the prompts of the `view`, if there is one."""
        if view is not None and view.lacks:
            return replace(trajectory, teacher_view=view)
        sequences = trajectory.sequences()
        prompts = [None] * len(sequences) if view is None else view.prompts
        answers = [await self._logprobs(*pair, budget) for pair in zip(sequences, prompts, strict=True)]
        if view is not None:
            told = zip(view.prompts, answers, strict=True)
            view = TeacherView(tuple(replace(prompt, version=answer.version) for prompt, answer in told))
        made = [answer.logprobs for answer in answers]
        of_branches = zip(trajectory.branches, made[1:], strict=True)
        taught = replace(
            trajectory,
            teacher_view=view,
            teacher_logprobs=made[0],
            branches=tuple(replace(branch, teacher_logprobs=own) for branch, own in of_branches),
            attempt=budget.used,
            failures=dict(budget.failures),
        )
        taught.validate()
        return taught

    async def _logprobs(
        self, sequence: EpisodeSequence, prompt: TeacherPrompt | None, budget: TokenBudget
    ) -> TeacherLogprobs:
        """Request log-probabilities of one sequence, with retries: float32 of its own tokens, 0 where not sampled.

        Raises as `add_logprobs`.
        """
        first, pause_s = int(np.flatnonzero(sequence.loss_mask)[0]), _AGAIN_S
        ids = sequence.token_ids if prompt is None else prompt.shown(sequence.token_ids)
        start = first + len(ids) - len(sequence.token_ids)
        while True:
            try:
                with self._status.waits_on(_TEACHER):
                    async with self._places:
                        answer = await self._ask_until_answered(ids, start)
                break
            except VolleyError as error:
                _log.warning("the teacher failed an episode", error=str(error), attempt=budget.used + 1)
                budget.count_failure(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_S)
        made = np.zeros(len(sequence.token_ids), np.float32)
        made[first:] = answer.logprobs
        made[sequence.loss_mask == 0] = 0.0
        self._status.moved()
        return TeacherLogprobs(made[sequence.shared :], answer.version)

    async def _ask_until_answered(self, ids: np.ndarray, start: int) -> TeacherLogprobs:
        """Repeat a request until it is answered or fails. It counts as one request."""
        if self._budget is not None:
            await retry_while_disk_full(partial(self._budget.spend, len(ids)), self._report_disk)
        pause_s = _AGAIN_S
        while True:
            try:
                with metrics.TEACHER_SECONDS.time():
                    return await self._teacher.logprobs(ids, start)
            except (TeacherAway, RateLimited) as error:
                self._warn(error)
                await asyncio.sleep(max(pause_s, min(error.retry_after_s, _MOST_S)))
                pause_s = min(2 * pause_s, _MOST_S)

    def _warn(self, error: VolleyError) -> None:
        """Warn once a minute, for all waiting episodes together."""
        if time.monotonic() - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = time.monotonic()
            _log.warning("waiting for the teacher", reason=str(error))

    def _report_disk(self, error: StorageUnavailable | None) -> None:
        self._status.disk = str(error) if error else None
