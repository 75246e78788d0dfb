"""A sandbox's only way out: HTTP requests to the model, carried by this service to one address.

The program's requests arrive on the socket that listens in the sandbox's own network namespace. Only requests below
`/v1` that are not about sessions leave. An answer is read whole before the program gets its first byte, so a request
whose connection breaks is sent again, with the same `Idempotency-Key`: the recorder answers it once. A program outlives
a restart of the recorder without noticing.
"""

from __future__ import annotations

import asyncio
import re
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yarl
from aiohttp import web

from services.env.backend import ModelAddress
from shared.process import telemetry
from shared.web.tls import client_context

MAX_REQUEST, MAX_ANSWER = 8 * 2**20, 16 * 2**20
"""Bytes of one body."""
MAX_REQUESTS, MAX_CONNECTIONS = 32, 128
"""Requests of one program that are carried at once, of which the rest wait, and its open connections."""
AGAIN_S = 0.5
_CONNECT_S = 5.0
_PATH = re.compile(r"/v1(?P<rest>(?:/[A-Za-z0-9_.:~-]{1,200}){1,8})(?P<query>\?[\x21-\x7e]{0,4000})?")
_OF_CONNECTIONS = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
    ]
)
_STARTING = frozenset({502, 503, 504})
_log = telemetry.Log("agents")

type Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Door:
    """Requests of one program that could not be delivered yet; `outage` is True while there are some."""

    waiting: set[str] = field(default_factory=set[str])

    @property
    def outage(self) -> bool:
        return bool(self.waiting)


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


@asynccontextmanager
async def serve(listening: socket.socket, handler: Handler) -> AsyncIterator[None]:
    """Answer the requests of a program that arrive on `listening`, which is closed at the end."""
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(MAX_REQUESTS)

    async def bounded(request: web.BaseRequest) -> web.StreamResponse:
        async with places:
            return await handler(request)

    def make(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_REQUEST)

    server = web.Server(bounded, request_factory=make, handler_cancellation=True, access_log=None)

    def connection() -> asyncio.BaseProtocol:
        return server() if len(server.connections) < MAX_CONNECTIONS else _Refused()

    accepting = await loop.create_server(connection, sock=listening)
    try:
        yield
    finally:
        accepting.close()
        await server.shutdown(0.0)


@asynccontextmanager
async def relay(address: ModelAddress, door: Door, ca_file: Path | None = None) -> AsyncIterator[Handler]:
    """Handler that carries requests to `address.base_url`."""
    tls = client_context(ca_file) if address.base_url.startswith("https://") else False
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    connector = aiohttp.TCPConnector(ssl=tls, limit=MAX_REQUESTS)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:

        async def handler(request: web.BaseRequest) -> web.StreamResponse:
            found = _PATH.fullmatch(request.raw_path)
            if found is None or request.method not in ("GET", "POST") or _is_private(found["rest"]):
                return _refusal(404, f"{request.method} {request.raw_path[:200]} is not a route of the model")
            try:
                body = await request.read()
            except web.HTTPRequestEntityTooLarge:
                return _refusal(413, f"a request has at most {MAX_REQUEST} bytes")
            url = yarl.URL(address.base_url.rstrip("/") + found["rest"] + (found["query"] or ""), encoded=True)
            headers = {name: text for name, text in request.headers.items() if name.lower() not in _OF_CONNECTIONS}
            if "Idempotency-Key" not in request.headers:
                headers["Idempotency-Key"] = uuid.uuid4().hex
            return await _carry(session, request.method, url, headers, body, door)

        yield handler


def _is_private(rest: str) -> bool:
    """True for routes that are not the program's: sessions are opened, rewarded and ended by others."""
    parts = rest.split("/")
    return parts[1] == "sessions" or "." in parts or ".." in parts


async def _carry(
    session: aiohttp.ClientSession, method: str, url: yarl.URL, headers: Mapping[str, str], body: bytes, door: Door
) -> web.StreamResponse:
    """Send a request until an answer has arrived whole."""
    key = uuid.uuid4().hex
    try:
        while True:
            try:
                async with session.request(method, url, headers=headers, data=body, allow_redirects=False) as answer:
                    if answer.status not in _STARTING:
                        door.waiting.discard(key)
                        return await _whole(answer)
                    why = f"HTTP {answer.status}"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            if key not in door.waiting:
                _log.warning("the model cannot be reached; sending a program's request again", url=str(url), error=why)
            door.waiting.add(key)
            await asyncio.sleep(AGAIN_S)
    finally:
        door.waiting.discard(key)


async def _whole(answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Read an answer. Raises aiohttp.ClientError if the connection breaks."""
    parts, n = list[bytes](), 0
    async for part in answer.content.iter_any():
        parts.append(part)
        n += len(part)
        if n > MAX_ANSWER:
            return _refusal(502, f"the answer has more than {MAX_ANSWER} bytes")
    headers = {name: text for name, text in answer.headers.items() if name.lower() not in _OF_CONNECTIONS}
    return web.Response(status=answer.status, headers=headers, body=b"".join(parts))


def _refusal(status: int, message: str) -> web.StreamResponse:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
