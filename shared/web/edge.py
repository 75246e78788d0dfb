"""Edge of every service: a request's role, rate, body, span and duration, before and after its handler.

A request's role is checked before its body is read. A route that is open to everyone reads the body itself, after it
has checked a key of its own. Cookies are dropped: no service reads one, and parsing them can take seconds. Unknown
paths and the methods of a path are reported to everyone: 404, 405, and the answer to OPTIONS. HEAD is GET without the
content, for every GET route.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager

from fastapi import Request
from fastapi.responses import Response
from starlette.routing import Match, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.errors import (
    Forbidden,
    NotFound,
    RateLimited,
    TooLarge,
    Unauthorized,
    Unavailable,
    VolleyError,
    WrongMethod,
)
from shared.process import telemetry, tracing
from shared.services_schema import Limits
from shared.web.access import AccessTokens, Role, RoleTable
from shared.web.connection import WHOLE_BODY
from shared.web.limits import RateLimiter
from shared.web.problems import problem_response

_SMALL_BODY = 256 * 1024  # bytes that every request may send, at any load
_LARGE_BODIES = 16  # number of bodies of the largest size that may be arriving at once
_REQUESTS = telemetry.Histogram(
    "volley_http_request_seconds", "Duration of a request", ["method", "route", "status"], registry=telemetry.REGISTRY
)
_METHODS_COUNTED = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BUG = 500
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_MAX_NAME = 80


class DirectRoute:
    """A busy route that `Edge` answers itself, without FastAPI, Starlette's middleware and router.

    Those cost several times what the handlers of every turn do. FastAPI keeps a route of the same path and handler for
    the documentation, and for other methods.

    Args:
        method: HTTP method.
        path: with `{names}`; the handler gets the request, and the names as keyword arguments.
    """

    def __init__(self, method: str, path: str, handler: Callable[..., Awaitable[Response]]) -> None:
        self.method, self.path, self._handler = method, path, handler
        self._match = compile_path(path)[0].fullmatch

    def params(self, scope: Scope) -> dict[str, str] | None:
        """Return the names in a request's path; None if the request is for another route."""
        found = self._match(scope["path"]) if scope["method"] == self.method else None
        return found and found.groupdict()

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; an error of the handler, or of its answer before that begins, is a problem."""
        try:
            answer = await self._handler(Request(scope, receive), **scope["path_params"])
            await answer(scope, receive, send)
        except VolleyError as error:
            await problem_response(error, scope["path"])(scope, receive, send)


class Edge:
    """Check the caller's role, limit the body in bytes and time, and measure every request."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        tokens: AccessTokens | None,
        roles: RoleTable,
        direct: Sequence[DirectRoute] = (),
    ) -> None:
        self._app, self._limits, self._tokens, self._roles = app, limits, tokens, roles
        self._direct = [(route, roles.role_for_pattern(route.method, route.path)) for route in direct]
        self._admin_pace = RateLimiter(limits.admin_per_s)
        self._arriving = 0  # bytes of incomplete bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name != b"cookie"]
        scope = {**scope, "headers": headers}
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        started, status = time.perf_counter(), 499
        is_head = scope["method"] == "HEAD"
        if is_head:
            scope["method"] = "GET"

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        try:
            with _traced(scope) as span:
                await self._guarded(scope, receive, watched_send)
                _describe(span, scope, status)
        finally:
            route = _route_of(scope)
            _REQUESTS.labels(
                scope["method"] if scope["method"] in _METHODS_COUNTED else "other", route, status
            ).observe(time.perf_counter() - started)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open a WebSocket by the role of `WS /path`; refuse it with the same answer as a request."""
        try:
            self._admit(scope, self._roles.role_for("WS", scope["path"]) or Role.ADMIN)
        except VolleyError as error:
            await problem_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            route, needed = self._routed(scope)
            if needed is None:
                allow = _allowed(scope)
                if scope["method"] == "OPTIONS":
                    await Response(status_code=204, headers={"Allow": allow})(scope, receive, send)
                    return
                needed = Role.ADMIN
            self._admit(scope, needed)
            receive = self._whole(scope, receive)
            if needed is not Role.ANYONE:
                receive = _replay(await receive(), receive)
        except VolleyError as error:
            await problem_response(error, scope["path"])(scope, receive, send)
            return
        if route is None:
            await self._app(scope, receive, send)
        else:
            await route.run(scope, receive, send)

    def _routed(self, scope: Scope) -> tuple[DirectRoute | None, Role | None]:
        """Return a request's direct route, if any, and its required role."""
        for route, needed in self._direct:
            if (params := route.params(scope)) is not None:
                scope["route"], scope["path_params"] = route, params
                return route, needed
        return None, self._roles.role_for(scope["method"], scope["path"])

    def _admit(self, scope: Scope, needed: Role) -> None:
        """Check role and rate. Raises Unauthorized, Forbidden or RateLimited."""
        if self._tokens is not None and needed is not Role.ANYONE:
            self._authorize(scope, self._tokens, needed)
        if needed is Role.ADMIN:
            wait_s = self._admin_pace.wait_s(scope["client"][0] if scope.get("client") else "", time.monotonic())
            if wait_s:
                raise RateLimited("too many admin requests", "services.limits.admin_per_s sets the limit", wait_s)

    def _authorize(self, scope: Scope, tokens: AccessTokens, needed: Role) -> None:
        role = tokens.role_of(bearer(scope["headers"]))
        if role is None:
            raise Unauthorized("missing or wrong bearer token", "send Authorization: Bearer <token>")
        if role < needed:
            raise Forbidden(f"this needs the role {needed}; the token has the role {role}")

    def _whole(self, scope: Scope, receive: Receive) -> Receive:
        """Return a `receive` that yields the whole body first, and then what follows it. Raises as `_read`."""
        asked = False

        async def whole() -> Message:
            nonlocal asked
            if asked:
                return await receive()
            asked = True
            return {"type": "http.request", "body": await self._read(scope, receive), "more_body": False}

        return whole

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body. Raises TooLarge, or Unavailable if it stalls: a network or a paused process may recover."""
        limit = self._limits.max_body_bytes
        declared = next((value for key, value in scope["headers"] if key == b"content-length"), b"0")
        too_large = TooLarge(f"the body exceeds {limit} bytes", "services.limits.max_body_bytes sets the limit")
        if not declared.isdigit() or int(declared) > limit:
            raise too_large
        chunks, size = [], 0
        timeout_s = None if WHOLE_BODY in scope.get("extensions", ()) else self._limits.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s) if timeout_s else contextlib.nullcontext():
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Unavailable("the client disconnected before the body was complete")
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    self._arriving += len(chunks[-1])
                    if size > limit:
                        raise too_large
                    if size > _SMALL_BODY and self._arriving > _LARGE_BODIES * limit:
                        raise Unavailable("too many large bodies are arriving at once")
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise Unavailable(f"the body did not arrive within {self._limits.body_timeout_s:g} s") from None
        finally:
            self._arriving -= size


def _traced(scope: Scope) -> AbstractContextManager[tracing.Span | None]:
    """Return the span of a request that names its caller's span; none for other requests."""
    if not tracing.is_on():
        return contextlib.nullcontext()
    caller = next((value for key, value in scope["headers"] if key == b"traceparent"), b"")
    parent = tracing.received(caller.decode("latin-1"))
    return tracing.span(scope["method"], kind="server", parent=parent) if parent else contextlib.nullcontext()


def _describe(span: tracing.Span | None, scope: Scope, status: int) -> None:
    if span is not None:
        route = _route_of(scope)
        span.rename(f"{scope['method']} {route}")
        span.set({"http.request.method": scope["method"], "http.route": route, "http.response.status_code": status})
        if status >= _BUG:
            span.fail(f"answered {status}")


def _route_of(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "unmatched")


def bearer(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a request's Authorization header, or the token of `x-api-key`, which Anthropic's clients send, as one."""
    given = {key: value for key, value in reversed(headers) if key in (b"authorization", b"x-api-key")}
    return given.get(b"authorization") or b"Bearer " + given.get(b"x-api-key", b"")


def _allowed(scope: Scope) -> str:
    """Return the methods of a path, as in Allow.

    Raises NotFound for an unknown path, WrongMethod if it lacks the method.
    """
    routes, path = scope["app"].routes, scope["path"][:_MAX_NAME]
    methods = {m for m in _METHODS if any(route.matches({**scope, "method": m})[0] is Match.FULL for route in routes)}
    if not methods:
        raise NotFound(f"there is no {path!r} here", "GET /openapi.json lists all paths")
    allow = ", ".join(sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())))
    if scope["method"] not in {*methods, "OPTIONS"}:
        raise WrongMethod(f"{path!r} does not take {scope['method']}", f"it takes {allow}", allow)
    return allow


def _replay(first: Message, receive: Receive) -> Receive:
    """Return a `receive` that yields a message already received, then what follows it (the disconnect)."""
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return first

    return replayed
