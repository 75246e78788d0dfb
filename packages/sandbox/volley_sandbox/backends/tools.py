"""Tools for any environment: the tools answer messages with tool calls, the environment all others.

A message with calls earns no reward and does not end the episode, unless it is the last allowed one. An episode's tools
are opened with its reset and closed with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.env.backend import EnvironmentBackend, LiveEpisode
from services.env.episode_types import Demonstration, Info, Message, StepResult
from services.env.processes import ProcessBackend
from services.env.threads import InThreads
from shared.errors import ConfigError, GivenUp
from volley_sandbox.tools.base import ToolContext, ToolDescription
from volley_sandbox.tools.dispatch import EpisodeTools
from volley_sandbox.tools.settings import ToolUse
from volley_sandbox.tools.toolset import ToolSet
from volley_serving.dialects.calls import tool_calls_of, write_call
from volley_serving.templates.tool_text import add_to_system, describe_tools

_TIMEOUT_S = 29.0
"""Deadline of all calls of a message, in seconds, in addition to the tools' own deadlines."""


class WithTools:
    """The backend `base` with the tools of `tool_set`."""

    def __init__(self, name: str, base: EnvironmentBackend, tool_set: ToolSet) -> None:
        self.name, self.base, self.tool_set = name, base, tool_set
        self._tools: Sequence[ToolDescription] | None = None

    @property
    def use(self) -> ToolUse:
        return self.tool_set.config.tool_use

    async def splits(self) -> tuple[str, ...]:
        return await self.base.splits()

    async def num_tasks(self, split: str) -> int:
        return await self.base.num_tasks(split)

    async def task(self, split: str, index: int) -> str:
        return await self.base.task(split, index)

    async def reset(self, split: str, index: int, seed: int) -> ToolEpisode:
        episode = await self.base.reset(split, index, seed)
        try:
            if episode.tools:
                raise ConfigError(
                    f"{self.name} already has tools",
                    "remove data.env_config.tools, or the setting that adds them",
                )
            opened = await self.tool_set.open(ToolContext(seed, episode.database))
        except BaseException:
            await episode.close()
            raise
        opening = _describe_in_messages(episode.opening, opened.tools, self.use)
        return ToolEpisode(self.name, episode, opened, self.use, opening, [tool.schema for tool in opened.tools])

    async def demonstration(self, split: str, index: int) -> Demonstration:
        """The environment's own demonstration, with tool calls if it can write them."""
        shown = await self._with_calls(split, index) or await self.base.demonstration(split, index)
        tools = await self._described()
        schemas = tuple(tool.schema for tool in tools)
        return replace(shown, messages=_describe_in_messages(shown.messages, tools, self.use), tools=schemas)

    def stuck_reason(self) -> str | None:
        return self.base.stuck_reason()

    async def check_tools(self) -> None:
        await self.tool_set.check()

    async def _described(self) -> Sequence[ToolDescription]:
        """Tools of its episodes, opened once for all demonstrations."""
        if self._tools is None:
            opened = await self.tool_set.open(ToolContext(0))
            self._tools = tuple(opened.tools)
            await opened.close()
        return self._tools

    async def _with_calls(self, split: str, index: int) -> Demonstration | None:
        local = self.base.local if isinstance(self.base, ProcessBackend) else self.base
        if not isinstance(local, InThreads) or all(entry.calculator is None for entry in self.tool_set.config.tools):
            return None

        def show() -> Demonstration | None:
            make = getattr(local.environment, "calculator_demonstration", None)
            return None if make is None else make(split, index, self.use.max_turns, self.use.format)

        return await local.call("demonstrate", show)


@dataclass(slots=True)
class ToolEpisode:
    """One conversation. `turns` counts the messages with calls."""

    name: str
    episode: LiveEpisode
    opened: EpisodeTools
    use: ToolUse
    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    turns: int = field(default=0)

    @property
    def task(self) -> str:
        return self.episode.task

    @property
    def database(self) -> str | None:
        return self.episode.database

    async def step(self, message: Message) -> StepResult:
        calls = await tool_calls_of(message, self.use.format, self.tools)
        if not calls:
            result = await self.episode.step(message)
            return replace(result, info=replace(result.info, extra={**result.info.extra, **self._counts()}))
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answers = await self.opened.answer(calls)
        except TimeoutError:
            raise GivenUp(f"{self.name}: the tools did not answer within {_TIMEOUT_S:g} s") from None
        self.turns += 1
        messages = tuple(Message(role="tool", content=answer.text) for answer in answers)
        fault = None if all(answer.ok for answer in answers) else "tool"
        info = Info({}, False, fault, self._counts())
        return StepResult(messages, 0.0, False, self.turns >= self.use.max_turns, info)

    async def close(self) -> None:
        await self.opened.close()
        await self.episode.close()

    def _counts(self) -> dict[str, int]:
        return {"tool_calls": self.opened.n_calls, "tool_faults": self.opened.n_faults}


def _describe_in_messages(
    messages: tuple[Message, ...], tools: Sequence[ToolDescription], use: ToolUse
) -> tuple[Message, ...]:
    """Messages with the tools described in a system message, if configured."""
    if not use.describe:
        return messages
    example = write_call("NAME", {"ARGUMENT": "VALUE"}, use.format)
    text = describe_tools([tool.schema for tool in tools], example)
    return (*add_to_system(messages, text),)
