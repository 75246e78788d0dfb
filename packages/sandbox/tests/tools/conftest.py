"""The tools of one episode, from a configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest_asyncio

from services.env.threads import ThreadRunner
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.tools.base import ToolContext
from volley_sandbox.tools.dispatch import EpisodeTools
from volley_sandbox.tools.mcp import McpServers
from volley_sandbox.tools.settings import split_config
from volley_sandbox.tools.toolset import Toolbox, ToolSet
from volley_serving.dialects.calls import ToolCall

type OpenTools = Callable[..., Awaitable[EpisodeTools]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def toolbox() -> AsyncIterator[Toolbox]:
    async with Sandboxes() as sandboxes, McpServers() as servers:
        await sandboxes.probe()
        runner = ThreadRunner(4, 30.0, 64)
        yield Toolbox(sandboxes, runner, servers, ["python"])
        runner.close()


@pytest_asyncio.fixture(loop_scope="module")
async def open_tools(toolbox: Toolbox) -> AsyncIterator[OpenTools]:
    """Opens tools, which are closed with the test. Args: seed, database, and settings of their use."""
    async with AsyncExitStack() as stack:

        async def opened(*tools: Any, seed: int = 0, database: str | None = None, **use: Any) -> EpisodeTools:
            _, config = split_config("test", {"tools": list(tools), "tool_use": use})
            found = await ToolSet(toolbox, config).open(ToolContext(seed, database))
            stack.push_async_callback(found.close)
            return found

        yield opened


async def ask(tools: EpisodeTools, name: str, /, **arguments: Any) -> str:
    """The answer to one call; one that was not carried out begins with "error: "."""
    (answer,) = await tools.answer([ToolCall(name, arguments)])
    assert answer.ok != answer.text.startswith("error: ")
    return answer.text
