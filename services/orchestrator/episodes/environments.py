"""Calls to the environment service about one episode, repeated until they are answered.

All calls are idempotent by their request ids. A failure costs an attempt of the sample; an outage costs time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.failures import EpisodeLost
from services.orchestrator.episodes.turn import SamplingSpec
from services.orchestrator.status import RunStatus
from shared.clients.env import Opening, StepReply
from shared.errors import Conflict, NotFound, RateLimited, Unavailable, VolleyError
from shared.process import tracing
from shared.run import seeding

_DELETE_S = 2.0
_POLL_S, _AGAIN_S, _MOST_S = 0.5, 0.1, 5.0


class Environments(Protocol):
    """`EnvClient` methods that episodes use."""

    async def create(
        self, request_id: str, env: str, split: str, index: int, *, seed: int, snapshot: Any = None
    ) -> Opening: ...

    async def step(self, episode_id: str, request_id: str, content: str) -> StepReply: ...

    async def finish(self, episode_id: str, request_id: str) -> StepReply: ...

    async def delete_episode(self, episode_id: str) -> None: ...

    async def ready(self) -> None: ...


class EnvironmentCalls:
    """Calls of all episodes."""

    def __init__(self, environments: Environments, status: RunStatus) -> None:
        self.environments, self._status = environments, status

    async def ready(self) -> None:
        """Wait until the environment service accepts requests; only that or cancellation ends it."""
        with self._status.waits_on("env"):
            while True:
                with suppress(Unavailable):
                    return await self.environments.ready()
                await asyncio.sleep(_POLL_S)

    async def open(
        self, spec: SamplingSpec, request_id: str, budget: TokenBudget, *, is_kept: bool = False, snapshot: Any = None
    ) -> Opening:
        """Create an episode, or return the one already created with this request id.

        Args:
            is_kept: the episode is from an earlier process; a cancelled call does not delete it.
            snapshot: state of a lost episode, from which this one goes on.
        """
        try:
            opening = await self._repeat(lambda: self._create(spec, request_id, snapshot), spec, budget, started=False)
            self._status.turn_answered(spec.env, 0, 0.0)
            return opening
        except asyncio.CancelledError:
            if is_kept:
                raise
            # The service may have created the episode; the same request id returns its episode id.
            with suppress(VolleyError, TimeoutError):
                async with asyncio.timeout(_DELETE_S):
                    opening = await self._create(spec, request_id, snapshot)
                    await self.environments.delete_episode(opening.episode_id)
            raise

    async def renew(self, spec: SamplingSpec, request_id: str, episode_id: str) -> None:
        """Keep an unused episode from expiring. Raises EpisodeLost if the service no longer has it."""
        opening = await self._create(spec, request_id)
        if opening.episode_id != episode_id:
            await self.delete(opening.episode_id)
            raise EpisodeLost(f"the environment lost episode {episode_id}")

    async def _create(self, spec: SamplingSpec, request_id: str, snapshot: Any = None) -> Opening:
        seed = seeding.env_seed(spec.seed, spec.ticket, spec.sample_index)
        env, split, index = spec.env, spec.split, spec.index
        return await self.environments.create(request_id, env, split, index, seed=seed, snapshot=snapshot)

    async def call[T](
        self, spec: SamplingSpec, budget: TokenBudget, episode_id: str, call: Callable[[], Awaitable[T]]
    ) -> T:
        """Make a call about an existing episode. Raises EpisodeLost if the service does not know it."""
        failed = sum(budget.failures.values())
        try:
            return await self._repeat(call, spec, budget)
        except (NotFound, Conflict) as error:
            if sum(budget.failures.values()) > failed:
                budget.is_next_counted = True
            raise EpisodeLost(f"the environment lost episode {episode_id}: {error.detail}") from error

    async def _repeat[T](
        self, call: Callable[[], Awaitable[T]], spec: SamplingSpec, budget: TokenBudget, *, started: bool = True
    ) -> T:
        """Repeat a call until the episode's deadline, which outages extend.

        A failure that is no outage costs an attempt, and the service has to be ready again before the next call; a
        RateLimited answer costs none. Before the episode has started, waiting for the service to be ready costs no time
        either.
        """
        clock = asyncio.get_running_loop().time
        while True:
            started_at = clock()
            try:
                with (
                    self._status.waits_on("env", spec.env),
                    tracing.span("environment call", {"volley.env": spec.env}, kind="client"),
                ):
                    return await call()
            except RateLimited as error:
                await asyncio.sleep(error.retry_after_s)
                if not started:
                    with budget.outage():
                        await self.ready()
            except Unavailable as error:
                budget.count_failure(error, clock() - started_at)
                await asyncio.sleep(min(_MOST_S, _AGAIN_S * 2**budget.outages.n))
                with budget.outage():
                    await self.ready()

    async def delete(self, episode_id: str) -> None:
        """Delete an episode, best effort within a deadline; otherwise it expires by itself."""
        with suppress(VolleyError, TimeoutError):
            async with asyncio.timeout(_DELETE_S):
                await self.environments.delete_episode(episode_id)
