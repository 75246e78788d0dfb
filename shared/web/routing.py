"""Routes, and the application they make: Starlette's, with what the OpenAPI document says of each beside its handler.

A handler reads its body and writes its answer by hand (shared.web.http), so nothing is derived from its signature. That
is why this is not FastAPI: its import alone was a third of what the start of a light service costs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shared.web import openapi
from shared.web.access import Role
from shared.web.openapi import Declared

type Handler = Callable[..., Awaitable[Response]]
"""Takes the request, and the parts of the path that the route names, as keyword arguments."""


class DeclaredRoute(Route):
    """A route with its declaration; None keeps it out of the document. `scope["route"]` is the one that was taken."""

    def __init__(self, path: str, handler: Handler, method: str, declared: Declared | None) -> None:
        async def endpoint(request: Request) -> Response:
            return await handler(request, **request.path_params)

        super().__init__(path, endpoint, methods=[method])
        self.handler, self.method, self.declared = handler, method, declared

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self
        await super().handle(scope, receive, send)


class Router:
    """Collects routes: `@router.get("/runs/{name}")`.

    Args:
        prefix: of every path.
        tag: the heading of the document under which the routes stand.
        examples: of the named parts of paths, {"name": "quickstart"}.
    """

    def __init__(self, prefix: str = "", tag: str = "", examples: Mapping[str, str] | None = None) -> None:
        self.routes: list[DeclaredRoute] = []
        self._prefix, self._tag, self._examples = prefix, tag, dict(examples or {})

    def get(self, path: str, declared: Declared | None = None) -> Callable[[Handler], Handler]:
        return self._adds("GET", path, declared)

    def post(self, path: str, declared: Declared | None = None) -> Callable[[Handler], Handler]:
        return self._adds("POST", path, declared)

    def delete(self, path: str, declared: Declared | None = None) -> Callable[[Handler], Handler]:
        return self._adds("DELETE", path, declared)

    def _adds(self, method: str, path: str, declared: Declared | None) -> Callable[[Handler], Handler]:
        described = (declared or Declared()).within(self._tag, self._examples)

        def add(handler: Handler) -> Handler:
            self.routes.append(DeclaredRoute(self._prefix + path, handler, method, described))
            return handler

        return add


class ServiceApp(Starlette):
    """The HTTP application of one service.

    Args:
        roles: of all routes, {"POST /episodes/{id}/step": Role.SERVICE}, for the document.
        secured: whether the service asks for tokens.
    """

    def __init__(self, title: str, roles: Mapping[str, Role], *, secured: bool) -> None:
        super().__init__()
        self.title, self._roles, self._secured = title, roles, secured
        self._document: dict[str, Any] | None = None

    def include_router(self, router: Router) -> None:
        self.routes.extend(router.routes)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document of all declared routes, made when it is first asked for."""
        if self._document is None:
            self._document = openapi.document(self.title, self._operations(), self._roles, secured=self._secured)
        return self._document

    def _operations(self) -> Iterator[openapi.Operation]:
        for route in self.routes:
            if isinstance(route, DeclaredRoute) and route.declared is not None:
                yield openapi.Operation(route.method, route.path, route.handler, route.declared)
