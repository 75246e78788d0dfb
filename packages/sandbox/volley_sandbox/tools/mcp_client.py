"""Connection to a Model Context Protocol server through its official package.

A stdio server is a program of the operator's choice, and runs with the service's rights: with HOME, PATH and the
configured variables, and nothing else of the service's environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import IO, Any

import anyio
import httpx
import jsonschema
import referencing
from mcp import ClientSession, McpError, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from shared.errors import ConfigError, Unavailable, VolleyError
from shared.text import without_halves
from shared.web.access import read_token
from volley_sandbox.tools.base import ToolDescription, ToolFault
from volley_sandbox.tools.settings import McpSettings

MAX_OFFERED, MAX_SCHEMAS, MAX_CHECKED = 128, 2**18, 20_000
PING_S = 3.0
_CLOSED, _LATE = -32000, 408
_TOKEN_KEY = "tools.mcp.token_file"  # noqa: S105 - the name of a key


class McpClient:
    """An initialized session.

    Args:
        where: name of the server in messages.
    """

    def __init__(self, session: ClientSession, where: str, offered: Mapping[str, types.Tool]) -> None:
        self._session, self._where = session, where
        self.tools = tuple(
            ToolDescription(tool.name, tool.description or "", tool.inputSchema) for tool in offered.values()
        )
        no_others = referencing.Registry()  # a schema's references are never fetched
        self._validators = {
            name: jsonschema.validators.validator_for(tool.inputSchema)(tool.inputSchema, registry=no_others)
            for name, tool in offered.items()
        }

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Call a tool and return the answer's text.

        Raises ToolFault, Unavailable (the server is gone or hangs), VolleyError (the answer violates the protocol).
        """
        self._check(name, arguments)
        try:
            result = await self._session.call_tool(name, dict(arguments), timedelta(seconds=timeout_s))
        except McpError as error:
            if error.error.code == _CLOSED:
                raise self._gone("closed the connection") from error
            if error.error.code != _LATE:
                raise ToolFault(error.error.message) from None
            await self._check_alive()
            raise ToolFault(f"it took longer than {timeout_s:g} s") from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError, httpx.HTTPError) as error:
            raise self._gone(f"cannot be reached any more ({type(error).__name__})") from error
        except (RuntimeError, ValueError) as error:
            raise VolleyError(f"{self._where} answered {name} against the protocol: {str(error)[:300]}") from error
        text = "\n".join(_shown(block) for block in result.content)
        if not text and result.structuredContent is not None:
            text = json.dumps(result.structuredContent, ensure_ascii=False)
        if result.isError:
            raise ToolFault(text or "it failed")
        return text or "(no output)"

    def _check(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Validate arguments. Raises ToolFault.

        Large arguments and unusable schemas are skipped, because the server validates them anyway.
        """
        if len(str(arguments)) > MAX_CHECKED:
            return
        try:
            problem = jsonschema.exceptions.best_match(self._validators[name].iter_errors(dict(arguments)))
        except (jsonschema.SchemaError, referencing.exceptions.Unresolvable, RecursionError, TypeError, ValueError):
            return
        if problem is not None:
            at = ".".join(str(part) for part in problem.absolute_path)
            raise ToolFault(f"{f'the argument {at[:80]}: ' if at else ''}{problem.message[:300]}")

    async def _check_alive(self) -> None:
        """Ping the server. Raises Unavailable if it does not answer."""
        try:
            async with asyncio.timeout(PING_S):
                await self._session.send_ping()
        except (TimeoutError, McpError, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError) as error:
            raise self._gone("hangs: it does not answer a ping") from error

    def _gone(self, what: str) -> Unavailable:
        return Unavailable(
            f"{self._where} {what}", "check the server's log, and restart it; the episode is played again"
        )


class _SurrogateSafeMessages:
    """Messages of a transport, with lone surrogates replaced; the package would turn these messages into errors."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aenter__(self) -> _SurrogateSafeMessages:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._stream.__aexit__(*exception)

    def __aiter__(self) -> _SurrogateSafeMessages:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return _without_surrogates(await self._stream.__anext__())


def _without_surrogates(message: SessionMessage | Exception) -> SessionMessage | Exception:
    if not isinstance(message, ValidationError):
        return message
    wrong = message.errors(include_url=False)[0]
    if wrong["type"] != "json_invalid":
        return message
    raw = wrong["input"].encode() if isinstance(wrong["input"], str) else wrong["input"]
    try:
        return SessionMessage(types.JSONRPCMessage.model_validate_json(without_halves(raw)))
    except ValidationError:
        return message


@asynccontextmanager
async def connect(settings: McpSettings, where: str) -> AsyncIterator[McpClient]:
    """Connect to a server; one task must enter and leave. Raises Unavailable with the reason, ConfigError."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(settings.start_s):
                    client = await _opened(stack, settings, where, errors)
                yield client
        except Exception as error:
            cause = _first(error)
            if isinstance(cause, VolleyError):
                raise cause from None
            late = isinstance(cause, TimeoutError)
            why = f"it did not answer within {settings.start_s:g} s" if late else f"{type(cause).__name__}: {cause}"
            raise _unusable(where, why, errors) from error


async def _opened(stack: AsyncExitStack, settings: McpSettings, where: str, errors: IO[str]) -> McpClient:
    if settings.command is not None:
        kept = {name: os.environ[name] for name in settings.env if name in os.environ}
        cwd = str(settings.cwd) if settings.cwd is not None else None
        program = StdioServerParameters(command=settings.command[0], args=settings.command[1:], env=kept, cwd=cwd)
        streams = await stack.enter_async_context(stdio_client(program, errlog=errors))  # type: ignore[arg-type]
    else:
        headers = {}
        if settings.token_file is not None:
            headers["Authorization"] = f"Bearer {read_token(settings.token_file, _TOKEN_KEY)}"
        http = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(30.0, read=300.0), trust_env=False)
        await stack.enter_async_context(http)
        opened = await stack.enter_async_context(streamable_http_client(settings.url or "", http_client=http))
        streams = opened[:2]
    read: Any = _SurrogateSafeMessages(streams[0])
    session = await stack.enter_async_context(ClientSession(read, streams[1]))
    await session.initialize()
    return McpClient(session, where, _chosen(await _offered(session, where), settings, where))


async def _offered(session: ClientSession, where: str) -> dict[str, types.Tool]:
    """List all tools of a server, page by page. Raises Unavailable."""
    found: dict[str, types.Tool] = {}
    cursor: str | None = None
    while True:
        page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
        found |= {tool.name: tool for tool in page.tools}
        cursor = page.nextCursor
        if len(found) > MAX_OFFERED or sum(len(json.dumps(tool.inputSchema)) for tool in found.values()) > MAX_SCHEMAS:
            raise Unavailable(f"{where} offers more than {MAX_OFFERED} tools, or {MAX_SCHEMAS} characters of schemas")
        if cursor is None or not page.tools:
            return found


def _chosen(offered: Mapping[str, types.Tool], settings: McpSettings, where: str) -> Mapping[str, types.Tool]:
    """Select the configured tools. Raises ConfigError."""
    for name in settings.tools:
        if name not in offered:
            raise ConfigError(f"{where} has no tool {name!r}", f"it has: {', '.join(offered)}")
    return {name: offered[name] for name in settings.tools} if settings.tools else offered


def _shown(block: types.ContentBlock) -> str:
    match block:
        case types.TextContent():
            return block.text
        case types.EmbeddedResource(resource=types.TextResourceContents()):
            return block.resource.text
        case types.ResourceLink():
            return f"[{block.name}: {block.uri}]"
        case _:
            return f"[{block.type}: it cannot be shown as text]"


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _unusable(where: str, why: str, errors: IO[str]) -> Unavailable:
    errors.seek(0)
    stderr = errors.read(100_000).strip()[-300:]
    output = f"; it wrote: {stderr}" if stderr else ""
    return Unavailable(f"{where} cannot be used: {why[:300]}{output}", "fix its configuration, or start it")
