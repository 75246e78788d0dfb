"""Shows finished episodes to a teacher, whose log-probabilities of the sampled tokens then are part of them.

It is asked before the group is published, so they are in the queue and in the archive with what they belong to, and
nobody asks again. A teacher that is not there, or says that it has no time, is waited for: that has no deadline and
costs nothing, and as many episodes as may ask at once try again, ever more slowly; the others wait behind them. An
answer that fails costs one of the episode's attempts, but never the episode: the same one is shown again.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from services.orchestrator import metrics
from services.orchestrator.disk import once_there_is_room
from services.orchestrator.episodes.turn import TokenBudget
from services.orchestrator.status import RunStatus
from shared.clients.teacher import TeacherAway, TeacherRefused
from shared.errors import RateLimited, StorageUnavailable, VolleyError
from shared.files.spending import SpendingStore
from shared.process import telemetry
from shared.types import Trajectory

_AGAIN_S, _MOST_S = 0.1, 30.0
"""Between two questions: at first, and at most."""
_TELL_S = 60.0
_TEACHER = "teacher"
_log = telemetry.Log("teacher")


class Teacher(Protocol):
    """The part of `TeacherClient` that is used here."""

    async def logprobs(self, ids: np.ndarray, start: int) -> np.ndarray: ...


class TeachingBudget:
    """What the run may ask its teacher; counted on disk before it is asked."""

    def __init__(self, store: SpendingStore, max_requests: int | None, max_tokens: int | None) -> None:
        self._store, self._limits = store, (max_requests, max_tokens)

    def spend(self, n_tokens: int) -> None:
        """Blocks. Raises TeacherRefused when it is used up, StorageUnavailable."""
        used_up = self._store.count_request(_TEACHER, *self._limits)
        if used_up is not None:
            hint = f"raise services.orchestrator.teacher.{used_up.partition('=')[0]}"
            raise TeacherRefused(f"the budget of the teacher is used up: {used_up}", hint)
        self._store.count_tokens(_TEACHER, n_tokens)


class EpisodeTeaching:
    """Args:
    max_concurrent: questions at once.
    budget: None bounds nothing.
    """

    def __init__(
        self, teacher: Teacher, status: RunStatus, max_concurrent: int, budget: TeachingBudget | None = None
    ) -> None:
        self._teacher, self._status, self._places = teacher, status, asyncio.Semaphore(max_concurrent)
        self._budget, self._told_at = budget, -_TELL_S

    async def taught(self, trajectory: Trajectory, budget: TokenBudget) -> Trajectory:
        """The episode with the teacher's log-probabilities. Raises VolleyError when the attempts are used up, or
        another one cannot help.
        """
        first, pause_s = trajectory.prompt_len, _AGAIN_S
        while True:
            try:
                with self._status.waits_on(_TEACHER):
                    async with self._places:
                        told = await self._answered(trajectory.token_ids, first)
                break
            except VolleyError as error:
                _log.warning("the teacher failed an episode", error=str(error), attempt=budget.used + 1)
                budget.spend(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_S)
        made = np.zeros(len(trajectory.token_ids), np.float32)
        made[first:] = told
        made[trajectory.loss_mask == 0] = 0.0
        self._status.moved()
        taught = replace(trajectory, teacher_logprobs=made, attempt=budget.used, failures=dict(budget.failures))
        taught.validate()
        return taught

    async def _answered(self, ids: np.ndarray, start: int) -> np.ndarray:
        """Asks until there is an answer, or one that fails. The question counts once."""
        if self._budget is not None:
            await once_there_is_room(partial(self._budget.spend, len(ids)), self._without_room)
        pause_s = _AGAIN_S
        while True:
            try:
                with metrics.TEACHER_SECONDS.time():
                    return await self._teacher.logprobs(ids, start)
            except (TeacherAway, RateLimited) as error:
                self._tell(error)
                await asyncio.sleep(max(pause_s, min(error.retry_after_s, _MOST_S)))
                pause_s = min(2 * pause_s, _MOST_S)

    def _tell(self, error: VolleyError) -> None:
        """Once a minute, however many wait."""
        if time.monotonic() - self._told_at >= _TELL_S:
            self._told_at = time.monotonic()
            _log.warning("waiting for the teacher", reason=str(error))

    def _without_room(self, error: StorageUnavailable | None) -> None:
        self._status.disk = str(error) if error else None
