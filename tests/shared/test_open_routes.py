"""Cost of the routes that are open without a token, for the costliest heads that a connection lets through."""

import sys
from collections.abc import Callable
from types import FrameType

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.web.access import Role
from shared.web.connection import MAX_FIELD_BYTES
from shared.web.http import COMMON_ROLES
from tests.shared.test_access import SERVICES, make_app
from tests.shared.test_connection import refused, serving_demo
from volley_agents.sessions import routes as sessions
from volley_dashboard import docs_page
from volley_dashboard.page import app as dashboard
from volley_dashboard.page.entrance import Entrance
from volley_dashboard.page.runs import Runs

TABLES = {**{name: roles for name, (_, roles) in SERVICES.items()}, "dashboard": dashboard.ROLES}
COMMON = {**COMMON_ROLES, **docs_page.ROLES}
ROUTES = [
    (service, *route.split())
    for service, roles in TABLES.items()
    for route, role in {
        **COMMON_ROLES,
        **docs_page.ROLES,
        **roles,
        **(sessions.ROLES if service == "orchestrator" else {}),
    }.items()
    if role is Role.ANYONE
]


def app_of(service: str):
    if service == "dashboard":
        return dashboard.make_app(Runs([]), Entrance())
    app = make_app(service)
    if service == "orchestrator":
        app.include_router(sessions.router)
    return app


def filled(part: bytes, begin: bytes = b"") -> bytes:
    return begin + part * ((MAX_FIELD_BYTES - len(begin) - 20) // len(part)) + b"1"


HEADERS = {
    b"range": b"bytes=" + b",".join(b"%d-%d" % (2 * i, 2 * i) for i in range(900)),
    b"cookie": filled(b"\\a", b'a="'),
    b"accept": filled(b"text/plain;q=0.5,"),
    b"content-type": filled(b"a/b;c=d;"),
    b"authorization": filled(b" ", b"Bearer "),
    b"x-api-key": filled(b"vs_1_"),
    b"traceparent": filled(b"00-"),
}
"""One of each kind that a service or its framework parses; together as many as fit."""


class Counted:
    """An application that counts the lines of Python executed for its last request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.lines = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.lines = 0
        sys.settrace(self._trace)
        try:
            await self._app(scope, receive, send)
        finally:
            sys.settrace(None)

    def _trace(self, _frame: FrameType, event: str, _argument: object) -> Callable[..., object]:
        self.lines += event == "line"
        return self._trace


@pytest.mark.parametrize(("service", "method", "path"), ROUTES)
async def test_no_head_makes_an_open_route_costly(service: str, method: str, path: str):
    assert max(map(len, HEADERS.values())) <= MAX_FIELD_BYTES
    url = path.replace("{name}", "app.js").format(env="e", signature="s", expires=1, folder="f", file="f", digest="d")
    app = Counted(app_of(service))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        plain = await client.request(method, url)
        for query, most_lines in (("", 5_000), (filled(b"a=1&").decode(), 100_000)):
            answer = await client.request(method, f"{url}?{query}", headers=HEADERS)
            assert answer.status_code == plain.status_code
            assert answer.content == plain.content
            assert app.lines < most_lines


@pytest.mark.parametrize("target", [b"GET /?" + b"x" * MAX_FIELD_BYTES + b" HTTP/1.1", b"GET /health HTTP/1.1"])
async def test_a_connection_lets_no_longer_field_through(target: bytes):
    async with serving_demo() as connect:
        client = await connect()
        await client.send(target + b"\r\nHost: x\r\nX: " + b"y" * (MAX_FIELD_BYTES + 1) + b"\r\n\r\n")
        refused(await client.rest(), 431, "its target or one header 8192 bytes")
