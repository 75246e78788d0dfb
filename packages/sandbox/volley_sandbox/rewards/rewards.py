"""Additional rewards: judges and reward services, weighted and added at the end of an episode.

Invariants
- The reward of a step is the sum of its components. The environment's components keep their names, times its weight.
- An episode is scored once, when it is over or its client ends it. If a score is missing, it has no reward: the call
  fails, and a missing answer never counts as 0.
- While an answer is pending, the call raises `Busy`; repeating the call continues it, and steps nothing twice.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from services.env.backend import AgentPlayed, LiveEpisode, SeatedEpisode, finish_early
from services.env.episode_types import Message, StepResult, fingerprint
from shared.errors import Conflict, JudgementUnusable, RewardFailed, RewardRefused, VolleyError, first_error
from shared.process import tracing
from shared.reward_schema import EnvironmentRewards, JudgeReward, RewardServer, ServiceReward
from volley_sandbox.rewards import judge, service
from volley_sandbox.rewards.servers import AskedServer
from volley_sandbox.rewards.store import RewardStore

_MOST_SAID = 200


class Rewards:
    """All rewards that the configuration adds; an async context manager.

    Args:
        folder: folder in which answers are stored.

    Raises ConfigError, StorageUnavailable.
    """

    def __init__(
        self,
        rewards: Mapping[str, EnvironmentRewards],
        servers: Mapping[str, RewardServer],
        folder: Path,
        ca_file: Path | None = None,
    ) -> None:
        self._rewards, self._settings, self._folder, self._ca_file = rewards, servers, folder, ca_file
        self._servers: dict[str, AskedServer] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._rewards:
            store = await asyncio.to_thread(RewardStore, self._folder / "rewards.sqlite3")
            self._stack.enter_context(store)
            used = {c.server for rewarded in self._rewards.values() for c in rewarded.components.values()}
            for name in sorted(used):
                server = AskedServer(name, self._settings[name], store, self._ca_file)
                self._servers[name] = await self._stack.enter_async_context(server)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    def of(self, env: str) -> EnvironmentRewards | None:
        """Rewards of an environment; NAME@VERSION uses those of NAME unless it has its own."""
        return self._rewards.get(env) or self._rewards.get(env.partition("@")[0])

    def describe(self, env: str) -> Mapping[str, Any] | None:
        """Return the settings of an environment's rewards; None if it has none."""
        rewards = self.of(env)
        unshown = {"components": {"__all__": {"request"}}}  # the request may hold data that not every viewer may see
        return None if rewards is None else rewards.model_dump(mode="json", exclude=unshown)

    def wrap(self, env: str, episode: LiveEpisode) -> LiveEpisode:
        """Add the environment's rewards to an episode; without any, return it unchanged."""
        rewards = self.of(env)
        return episode if rewards is None else RewardedEpisode(env, episode, rewards, self._servers)


@dataclass(frozen=True, slots=True)
class _EndedEpisode:
    """End of an episode that is being scored: the message that ended it, and the environment's result."""

    by: str
    result: StepResult


class RewardedEpisode:
    """An episode that is scored at its end."""

    def __init__(
        self, env: str, inner: LiveEpisode, rewards: EnvironmentRewards, servers: Mapping[str, AskedServer]
    ) -> None:
        self._env, self._inner, self._rewards, self._servers = env, inner, rewards, servers
        self._played: list[Message] = []
        self._reward = 0.0
        self._expected: str | None = None
        self._ended: _EndedEpisode | None = None

    @property
    def task(self) -> str:
        return self._inner.task

    @property
    def opening(self) -> tuple[Message, ...]:
        return self._inner.opening

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._inner.tools

    @property
    def database(self) -> str | None:
        return self._inner.database

    async def step(self, message: Message) -> StepResult:
        """Step the episode. Raises RewardFailed, RewardRefused, and what the environment raises."""
        if isinstance(self._inner, SeatedEpisode) and self._inner.seats:
            detail = f"data.rewards scores whole episodes, and {self._env} rewards each of its seats"
            raise RewardRefused(detail, "give the seats their rewards in the environment")
        by = fingerprint(message)
        if self._ended is None:
            result = await self._inner.step(message)
            self._played += [message, *result.messages]
            self._reward += result.reward
            self._expected = _expected(result) or self._expected
            if not result.over:
                return _weighted(result, self._rewards.environment, {})
            self._ended = _EndedEpisode(by, result)
        return await self._end(by)

    async def finish(self) -> StepResult:
        """End and score the episode early: truncated, with the environment's own reward if it gives one."""
        if self._ended is None:
            result = await finish_early(self._inner)
            if isinstance(self._inner, AgentPlayed):
                self._played += self._inner.played
            self._reward += result.reward
            self._ended = _EndedEpisode("", result)
        return await self._end("")

    async def close(self) -> None:
        await self._inner.close()

    async def _end(self, by: str) -> StepResult:
        assert self._ended is not None
        if self._ended.by != by:
            raise Conflict("the episode is over and being scored", "send the same message again")
        last = self._ended.result
        components = self._rewards.components
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = {name: tasks.create_task(self._traced(name, c, last)) for name, c in components.items()}
        except* VolleyError as group:
            raise first_error(group) from None
        scores: dict[str, float] = {}
        for task in asked.values():
            scores |= task.result()
        return _weighted(last, self._rewards.environment, scores)

    async def _traced(self, name: str, component: JudgeReward | ServiceReward, last: StepResult) -> dict[str, float]:
        kind = "judge" if isinstance(component, JudgeReward) else "reward service"
        with tracing.span(kind, {"volley.reward": name, "volley.env": self._env}, kind="client"):
            return await self._scored(name, component, last)

    async def _scored(self, name: str, component: JudgeReward | ServiceReward, last: StepResult) -> dict[str, float]:
        """Weighted scores by name."""
        expected = self._expected
        server = self._servers[component.server]
        if isinstance(component, JudgeReward):
            asked = judge.question(component, self.opening, self._played, expected)
            try:
                answer = await server.ask(asked)
            except JudgementUnusable:
                if component.unreadable is None:
                    raise
                return {name: component.weight * component.unreadable}
            score = await judge.score(component, answer)
            if score is None:
                detail = f"the judge {name} gave no score from {component.scale[0]:g} to {component.scale[1]:g}"
                raise RewardFailed(
                    f"{detail}: …{answer[-_MOST_SAID:]}", "check the judge's pattern, field and unreadable"
                )
            return {name: component.weight * score}
        messages = (*self.opening, *self._played)
        asked = service.question(self._env, self.task, messages, last, self._reward, expected, component.version)
        given = service.scores(await server.ask(asked))
        return {f"{name}/{part}" if part else name: component.weight * score for part, score in given.items()}


def _expected(result: StepResult) -> str | None:
    """The right answer, if the environment returns one as text or a number."""
    expected = result.info.extra.get("expected")
    return str(expected) if isinstance(expected, str | int | float) and not isinstance(expected, bool) else None


def _weighted(result: StepResult, weight: float, scores: Mapping[str, float]) -> StepResult:
    parts = {name: weight * value for name, value in result.info.reward_components.items()}
    for name, score in scores.items():
        parts[name] = parts.get(name, 0.0) + score
    reward = math.fsum((weight * result.reward, *scores.values())) if scores else weight * result.reward
    return replace(result, reward=reward, info=replace(result.info, reward_components=parts))
