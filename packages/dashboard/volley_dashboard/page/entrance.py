"""Admission of browsers: a link that works once, then a cookie.

Browsers send a cookie to all ports of a host, so its name holds the port: several dashboards may run. It holds a
viewer's token, so routes check roles as those of every service do. Programs may send the token in an Authorization
header instead.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "volley_dashboard"
_POLICY = (
    "default-src 'none'; script-src 'self' {script}; style-src 'self' {style}; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Entrance:
    """Viewer's token of one server, and the link's code until somebody has used it."""

    def __init__(self, code: str | None = None) -> None:
        self.token = secrets.token_urlsafe(32)
        self.code: str | None = code or new_code()

    def admits(self, code: str) -> bool:
        """Return True if the code is right, and use it up."""
        if self.code is None or not hmac.compare_digest(code.encode(), self.code.encode()):
            return False
        self.code = None
        return True

    def cookie(self, scope: Scope) -> str:
        """Return the header that sets the cookie, in the answer to a request."""
        return f"{_name(scope)}={self.token}; Path=/; HttpOnly; SameSite=Strict"


def new_code() -> str:
    return secrets.token_urlsafe(24)


def link(listener: socket.socket, code: str) -> str:
    """Return the address that admits a browser: of this machine if the server listens on every interface."""
    host, port = listener.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/login?code={code}"


class CookieAccess:
    """Hand the cookie's token to the application as an Authorization header, and add security headers to answers.

    `script`, `style`: digests of the only script and style sheet that may stand in a page, `'sha256-…'`.
    """

    def __init__(self, app: ASGIApp, script: str, style: str) -> None:
        self._app = app
        policy = _POLICY.format(script=script, style=style)
        self._headers = ((b"content-security-policy", policy.encode()), *_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        if not any(name == b"authorization" for name, _ in headers):
            found = [token for name, value in headers if name == b"cookie" and (token := _token(value, _name(scope)))]
            headers = [*headers, *((b"authorization", f"Bearer {token}".encode()) for token in found[:1])]

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*self._others(message.get("headers", ())), *self._headers]}
            await send(message)

        await self._app({**scope, "headers": headers}, receive, secured)

    def _others(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        names = {name for name, _ in self._headers}
        return [(name, value) for name, value in headers if name.lower() not in names]


def _name(scope: Scope) -> str:
    """Return the name of the cookie of the server that got a request."""
    return f"{COOKIE}_{scope['server'][1]}"


def _token(cookies: bytes, name: str) -> str:
    """Return the token among the cookies; empty if there is none."""
    pairs = (pair.strip().partition(b"=") for pair in cookies.split(b";"))
    return next((token.decode() for key, _, token in pairs if key == name.encode() and token.isascii()), "")
