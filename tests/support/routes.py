"""Routes of an application under test, beside a service's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shared.web.http import respond
from shared.web.routing import DeclaredRoute, ServiceApp


def route(app: ServiceApp, *keys: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`@route(app, "GET /slow")`: the handler takes the request and the parts of the path, and may be a plain function.
    What it returns that is no Response is sent as JSON.
    """

    def add(handler: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: Request, **parts: str) -> Response:
            value = handler(request, **parts)
            value = await value if inspect.isawaitable(value) else value
            return value if isinstance(value, Response) else respond(request, value)

        for key in keys:
            method, _, path = key.partition(" ")
            app.routes.append(DeclaredRoute(path, answer, method, None))
        return handler

    return add
