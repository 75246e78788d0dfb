"""Tools of Model Context Protocol servers, with shared or separate connections.

The servers are external: their answers need not be reproducible, and their state may outlive an episode. Invariant: a
connection lives in its own task, whose failure affects nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from shared.errors import ConfigError, RateLimited, Unavailable, VolleyError
from shared.process import telemetry
from volley_sandbox.tools.base import ToolDescription
from volley_sandbox.tools.settings import McpSettings

if TYPE_CHECKING:
    from volley_sandbox.tools.mcp_client import McpClient

MAX_CONNECTIONS = 256
_AT_ONCE = 4
"""Servers that are started at once; each is a program that has to load."""
_log = telemetry.Log("mcp")


class McpConnection:
    """One server as its task sees it. `client` is set once it has answered; `closing` tells the task to disconnect."""

    def __init__(self) -> None:
        self.client: asyncio.Future[McpClient] = asyncio.get_running_loop().create_future()
        self.closing = asyncio.Event()
        self.is_open = True


class McpServers:
    """All connections of the service; an async context manager."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._connections: set[McpConnection] = set()
        self._shared: dict[str, McpConnection] = {}
        self._starting = asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._stack.callback(self._close_all)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def open(self, settings: McpSettings) -> McpSession:
        """Open a session. Raises Unavailable, RateLimited, ConfigError."""
        if not settings.shared:
            connection = self._connect(settings)
        else:
            key = settings.model_dump_json()
            connection = self._shared.get(key) or self._connect(settings)
            if not connection.is_open:
                connection = self._connect(settings)
            self._shared[key] = connection
        try:
            client = await asyncio.shield(connection.client)
        except BaseException:
            if not settings.shared:
                connection.closing.set()
            raise
        return McpSession(settings, connection, client)

    def _connect(self, settings: McpSettings) -> McpConnection:
        if len(self._connections) >= MAX_CONNECTIONS:
            raise RateLimited(f"{MAX_CONNECTIONS} MCP servers are connected already", "try again later", 2.0)
        if self._tasks is None:
            raise Unavailable("MCP servers are not available: the service is not running")
        connection = McpConnection()
        connection.client.add_done_callback(_ignore_error)
        self._connections.add(connection)
        self._tasks.create_task(self._hold(settings, connection))
        return connection

    async def _hold(self, settings: McpSettings, connection: McpConnection) -> None:
        """Task of a connection: open it, wait, close it."""
        where = f"the MCP server {settings.url or ' '.join(settings.command or ())[:200]}"
        try:
            try:
                from volley_sandbox.tools.mcp_client import connect
            except ImportError as error:
                hint = "install it: pip install 'mcp>=1.20,<2'"
                raise ConfigError(f"{where} needs the package mcp: {error}", hint) from error
            async with AsyncExitStack() as stack:
                async with self._starting:
                    client = await stack.enter_async_context(connect(settings, where))
                connection.client.set_result(client)
                await connection.closing.wait()
        except Exception as error:  # noqa: BLE001 - waiting callers get the error; the other connections continue
            if not connection.client.done():
                known = error if isinstance(error, VolleyError) else Unavailable(f"{where} cannot be used: {error}")
                connection.client.set_exception(known)
            else:
                _log.warning("closing an MCP server failed", server=where, error=str(error)[:300])
        finally:
            connection.is_open = False
            connection.client.cancel()
            self._connections.discard(connection)

    def _close_all(self) -> None:
        for connection in self._connections:
            connection.closing.set()


class McpSession:
    """Tools of one server in one episode. Calls to the server run concurrently."""

    lane = None

    def __init__(self, settings: McpSettings, connection: McpConnection, client: McpClient) -> None:
        self._settings, self._connection, self._client = settings, connection, client
        self.tools: Sequence[ToolDescription] = tuple(
            ToolDescription(settings.prefix + tool.name, tool.description, tool.parameters) for tool in client.tools
        )

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        try:
            return await self._client.call(name.removeprefix(self._settings.prefix), arguments, timeout_s)
        except Unavailable:
            self._connection.is_open = False
            self._connection.closing.set()  # also of a shared connection: the next episode opens another
            raise

    async def close(self) -> None:
        """Let the connection close in its own task."""
        if not self._settings.shared:
            self._connection.closing.set()


def _ignore_error(future: asyncio.Future[Any]) -> None:
    """Mark the error as retrieved, because the waiting caller may have left."""
    if not future.cancelled():
        future.exception()
