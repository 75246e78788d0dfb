"""Run single episodes with bounded concurrency, and retry after infrastructure failures.

An attempt starts only when a rollout server can be used and, after a failure, when the environment service is ready.
Both waits have no deadline: an outage costs time, not attempts. A failure never becomes a reward; when attempts are
used up, or ten outages met a sample that got no further, it is raised.
"""

from __future__ import annotations

import asyncio
import random
import time

from services.orchestrator import metrics
from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.episodes.teaching import Teaching
from services.orchestrator.episodes.turn import SamplingSpec
from services.orchestrator.servers.balancer import Balancer
from services.orchestrator.servers.slots import Purpose, Slots
from services.orchestrator.status import RunStatus
from shared.errors import VolleyError
from shared.process import telemetry, tracing
from shared.types import Trajectory

_BACKOFF_S, _BACKOFF_CAP_S = 0.2, 5.0
_log = telemetry.Log("dispatch")


class Dispatcher:
    """Dispatcher of episodes.

    Args:
        slots: number of episodes at once.
        teaching: adds the teacher's log-probabilities to training episodes.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        balancer: Balancer,
        status: RunStatus,
        *,
        slots: Slots,
        max_attempts: int,
        teaching: Teaching | None = None,
    ) -> None:
        self._runner, self._balancer, self._status, self._teaching = runner, balancer, status, teaching
        self._slots = slots
        self._max_attempts = max_attempts

    @property
    def limit(self) -> int:
        """Number of episodes that may run at once now."""
        return self._slots.limit

    async def episode(self, spec: SamplingSpec, purpose: Purpose) -> Trajectory:
        """Run one episode. Raises VolleyError: the last failure, when attempts are used up or cannot help."""
        about = {"volley.env": spec.env, "volley.task": spec.index, "volley.sample": spec.sample_index}
        try:
            with tracing.span("episode" if purpose == "train" else "evaluation episode", about):
                return await self._episode(spec, purpose)
        finally:
            if spec.barrier is not None:
                spec.barrier.leave()

    async def _episode(self, spec: SamplingSpec, purpose: Purpose) -> Trajectory:
        budget, started_at, failed_turns = TokenBudget(self._max_attempts), time.time(), set[int]()
        await self._balancer.wait_routable(spec.need)  # an evaluation that keeps weights back may need the slot
        async with self._slots.taken(purpose):
            tracing.record("wait for a slot", tracing.here(), started_at)
            while True:
                try:
                    with tracing.span("attempt", {"volley.attempt": budget.used}) as span:
                        trajectory = await self._attempt(spec, budget, purpose)
                        span.set({"volley.reward": trajectory.reward, "volley.end": trajectory.end or ""})
                        return trajectory
                except VolleyError as error:
                    self._status.episode_failed(spec.env, error)
                    if budget.turn not in failed_turns:  # a sample that fails again at the same turn counts once
                        failed_turns.add(budget.turn)
                        self._status.attempt_failed(spec.env, budget.turn, budget.reward, error)
                    error.add_note(f"in {spec.env} at turn {budget.turn}")
                    _log.warning(
                        "episode failed",
                        ticket=spec.ticket,
                        sample_index=spec.sample_index,
                        attempt=budget.used,
                        error=str(error),
                    )
                    budget.count_failure(error)
                    n = budget.used + budget.outages.n
                    await asyncio.sleep(min(_BACKOFF_CAP_S, _BACKOFF_S * 2**n) * random.uniform(0.5, 1.0))

    async def _attempt(self, spec: SamplingSpec, budget: TokenBudget, purpose: Purpose) -> Trajectory:
        budget.start_attempt()
        if budget.failures:
            await self._runner.environment_ready()
        await self._balancer.wait_routable(spec.need)
        with self._status.episode(), metrics.EPISODES_RUNNING.track_inprogress():
            trajectory = await self._runner.run(spec, budget)
            if self._teaching is not None and purpose == "train":
                with tracing.span("teacher"):
                    trajectory = await self._teaching.add_logprobs(trajectory, budget)
        self._status.ended(trajectory)
        metrics.count(purpose, trajectory)
        return trajectory
