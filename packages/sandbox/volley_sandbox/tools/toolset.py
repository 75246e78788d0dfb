"""Tools that an environment's configuration names, opened for each episode."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from services.env.threads import ThreadRunner
from shared.errors import ConfigError, Forbidden
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.tools.base import ToolContext, ToolSession
from volley_sandbox.tools.calculator import CalculatorSession
from volley_sandbox.tools.dispatch import EpisodeTools
from volley_sandbox.tools.mcp import McpServers
from volley_sandbox.tools.python import PythonSession
from volley_sandbox.tools.settings import (
    CalculatorSettings,
    McpSettings,
    PythonSettings,
    SqlSettings,
    ToolsConfig,
    ToolSettings,
    WorkspaceSettings,
)
from volley_sandbox.tools.sql import SqlSession
from volley_sandbox.tools.workspace import Workspace, WorkspaceSession

MIN_TIER = 1
ANY_TOOLS = ToolsConfig.model_validate({"tools": ["calculator", "python", "sql", "workspace"]})
"""Tools that any environment can have, with default settings."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Resources that tools and programs use.

    `unconfined` names the tools and environments that may run on a machine without an adequate sandbox.
    """

    sandboxes: Sandboxes
    runner: ThreadRunner
    servers: McpServers
    unconfined: Collection[str] = ()

    async def check_confined(self, what: str, name: str) -> None:
        """Raises Forbidden if model-written code would run unconfined and `name` may not; Unavailable."""
        if name in self.unconfined or self.sandboxes.has_containers:
            return
        tier = self.sandboxes.tier or await self.sandboxes.probe()
        if tier.level < MIN_TIER:
            raise Forbidden(
                f"{what} is refused: this machine cannot confine model-written code ({tier.missing})",
                f"to allow it anyway, set services.env.unsandboxed: [{name}]",
            )


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of an environment."""

    toolbox: Toolbox
    config: ToolsConfig

    async def open(self, context: ToolContext) -> EpisodeTools:
        """Open the tools for one episode.

        Raises Forbidden (no sandbox here), ConfigError (two tools with one name), Unavailable (a server does not
        answer).
        """
        async with AsyncExitStack() as stack:
            sessions: list[ToolSession] = []
            workspace = self._workspace()
            for entry in self.config.tools:
                session = await self._session(entry.settings, context, workspace)
                stack.push_async_callback(session.close)
                sessions.append(session)
            _check_names(sessions)
            stack.pop_all()
        return EpisodeTools(sessions, self.config.tool_use)

    async def check(self) -> None:
        """Try the tools that depend on the configuration alone.

        Raises InputError (a script or database of the SQL tool cannot be opened), Busy, Unavailable.
        """
        for entry in self.config.tools:
            if entry.sql is not None:
                await SqlSession(entry.sql, self.toolbox.runner, None).check()

    def _workspace(self) -> Workspace | None:
        settings = next((entry.workspace for entry in self.config.tools if entry.workspace is not None), None)
        return None if settings is None else settings.workspace()

    async def _session(self, settings: ToolSettings, context: ToolContext, workspace: Workspace | None) -> ToolSession:
        match settings:
            case CalculatorSettings():
                return CalculatorSession()
            case PythonSettings():
                await self.toolbox.check_confined("the tool python", "python")
                return PythonSession(settings, self.toolbox.sandboxes, context.seed, workspace)
            case SqlSettings():
                return SqlSession(settings, self.toolbox.runner, context.database)
            case WorkspaceSettings():
                assert workspace is not None
                return WorkspaceSession(workspace)
            case McpSettings():
                return await self.toolbox.servers.open(settings)
            case _:
                raise ConfigError(f"{type(settings).__name__} is not a tool")


def _check_names(sessions: Sequence[ToolSession]) -> None:
    names = [tool.name for session in sessions for tool in session.tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"tools: two tools have the name {twice[0]!r}", "give an MCP server a prefix")
