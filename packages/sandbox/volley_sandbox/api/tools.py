"""Routes that list tools and try a call, for people."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.env.api.state import state_of
from shared.errors import NotFound, RateLimited, Unavailable
from shared.web import http
from shared.web.access import Role
from shared.web.http import respond
from shared.web.openapi import declares
from shared.web.routes import ServiceRoutes
from volley_sandbox.api.answers import ToolAnswered, ToolsListed
from volley_sandbox.api.schemas import CallBody, ToolsQuery
from volley_sandbox.backends.tools import WithTools
from volley_sandbox.extension import MAX_TRIALS, extension_of
from volley_sandbox.tools.base import ToolContext
from volley_sandbox.tools.dispatch import EpisodeTools
from volley_sandbox.tools.settings import ToolUse
from volley_serving.dialects.calls import ToolCall

router = APIRouter(tags=["tools"])
ROUTES = ServiceRoutes(router, {"GET /tools": Role.SERVICE, "POST /tools/{name}/call": Role.SERVICE})
"""Listing the tools of an MCP server may start it, which a viewer may not do."""
_TIMEOUT_S = 28.0


@router.get("/tools", openapi_extra=declares(query=ToolsQuery, answer=ToolsListed))
async def list_tools(request: Request) -> Response:
    """List the tools that an environment gives its episodes, with their schemas and limits.

    Without `env`, list the tools that any environment can have, with default settings.
    """
    query = http.validated(ToolsQuery, dict(request.query_params), strict=False)
    async with _opened(request, query.env, 0) as (tools, use):
        rows = [tool.schema["function"] for tool in tools.tools]
    return respond(request, {"tools": rows, "tool_use": use.model_dump()})


@router.post("/tools/{name}/call", openapi_extra=declares(body=CallBody, answer=ToolAnswered))
async def call_tool(request: Request, name: str) -> Response:
    """Answer one call as a model would read it.

    The call runs in an episode of its own, whose variables, files and databases end with it. Wrong arguments are
    reported in the answer's text, as they are to a model.
    """
    body = await http.read_model(request, CallBody)
    async with _opened(request, body.env, body.seed) as (tools, _):
        names = [tool.name for tool in tools.tools]
        if name not in names:
            raise NotFound(f"there is no tool {name[:80]!r}", f"there are: {', '.join(names)}")
        (answer,) = await tools.answer([ToolCall(name, body.arguments)])
    return respond(request, {"text": answer.text, "ok": answer.ok})


@asynccontextmanager
async def _opened(request: Request, env: str | None, seed: int) -> AsyncIterator[tuple[EpisodeTools, ToolUse]]:
    """Open the tools of an environment for one episode, with a deadline.

    Raises NotFound, RateLimited, Unavailable.
    """
    extension = extension_of(request)
    backend = None if env is None else state_of(request).catalogue.get(env).backend
    chosen = backend.tool_set if isinstance(backend, WithTools) else extension.tools
    if env is not None and not isinstance(backend, WithTools):
        raise NotFound(f"the environment {env!r} has no tools", "list tools in its setting tools")
    if extension.tool_places.locked():
        raise RateLimited(f"{MAX_TRIALS} requests are trying tools already", "try again later", 2.0)
    async with extension.tool_places:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                tools = await chosen.open(ToolContext(seed))
                try:
                    yield tools, chosen.config.tool_use
                finally:
                    await tools.close()
        except TimeoutError:
            raise Unavailable(f"the tools did not answer within {_TIMEOUT_S:g} s") from None
