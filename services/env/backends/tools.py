"""Any environment with tools: messages with tool calls are answered by the tools, all others by the environment.

A message with calls earns nothing and ends nothing, unless it is the last that is granted. The tools of an episode are
opened with its reset and closed with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.env.backend import Backend, LiveEpisode
from services.env.backends.processes import InProcesses
from services.env.episode_types import Demonstration, Info, Message, StepResult
from services.env.threads import InThreads
from services.env.tools.base import ToolContext, ToolDescription
from services.env.tools.calls import CallFormat, tool_calls_of, write_call
from services.env.tools.dispatch import EpisodeTools
from services.env.tools.settings import ToolUse
from services.env.tools.toolset import ToolSet
from shared.errors import ConfigError, GivenUp

_PATIENCE_S = 29.0
"""For all calls of a message, whatever their own bounds."""


class WithTools:
    """The backend `base` with the tools of `tool_set`."""

    def __init__(self, name: str, base: Backend, tool_set: ToolSet) -> None:
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
                    f"{self.name} has tools of its own",
                    "leave out data.env_config.tools, or the setting that adds them",
                )
            opened = await self.tool_set.open(ToolContext(seed, episode.database))
        except BaseException:
            await episode.close()
            raise
        opening = _told(episode.opening, opened.tools, self.use)
        return ToolEpisode(self.name, episode, opened, self.use, opening, [tool.schema for tool in opened.tools])

    async def demonstration(self, split: str, index: int) -> Demonstration:
        """The environment's own, with calls where it knows how to write them."""
        shown = await self._with_calls(split, index) or await self.base.demonstration(split, index)
        tools = await self._described()
        schemas = tuple(tool.schema for tool in tools)
        return replace(shown, messages=_told(shown.messages, tools, self.use), tools=schemas)

    def why_stuck(self) -> str | None:
        return self.base.why_stuck()

    async def _described(self) -> Sequence[ToolDescription]:
        """The tools that episodes have; opened once for all demonstrations."""
        if self._tools is None:
            opened = await self.tool_set.open(ToolContext(0))
            self._tools = tuple(opened.tools)
            await opened.close()
        return self._tools

    async def _with_calls(self, split: str, index: int) -> Demonstration | None:
        local = self.base.local if isinstance(self.base, InProcesses) else self.base
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
            async with asyncio.timeout(_PATIENCE_S):
                answers = await self.opened.answer(calls)
        except TimeoutError:
            raise GivenUp(f"{self.name}: the tools did not answer within {_PATIENCE_S:g} s") from None
        self.turns += 1
        messages = tuple(Message(role="tool", content=answer.text) for answer in answers)
        fault = None if all(answer.fine for answer in answers) else "tool"
        info = Info({}, False, fault, self._counts())
        return StepResult(messages, 0.0, False, self.turns >= self.use.max_turns, info)

    async def close(self) -> None:
        await self.opened.close()
        await self.episode.close()

    def _counts(self) -> dict[str, int]:
        return {"tool_calls": self.opened.n_calls, "tool_faults": self.opened.n_faults}


def _told(messages: tuple[Message, ...], tools: Sequence[ToolDescription], use: ToolUse) -> tuple[Message, ...]:
    """The first messages, with the tools in a system message if they are to be told there."""
    if not use.describe:
        return messages
    told = describe_tools(tools, use.format)
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return ({**first, "content": f"{first['content']}\n\n{told}"}, *messages[1:])
    return (Message(role="system", content=told), *messages)


def describe_tools(tools: Sequence[ToolDescription], form: CallFormat) -> str:
    """What chat templates say of tools, for those that say nothing."""
    rows = [f"- {tool.name}({', '.join(tool.parameters.get('properties', {}))}): {tool.description}" for tool in tools]
    example = write_call("NAME", {"ARGUMENT": "VALUE"}, form)
    return "\n".join(["You can use tools:", *rows, f"Call one like this, and wait for its result: {example}"])
