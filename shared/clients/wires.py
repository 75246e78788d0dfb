"""Transports of an HttpClient: connections of our own, or aiohttp's (shared.clients.direct has a third, for tests)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import aiohttp

from shared.clients.connections import CONNECT_S, KEEPALIVE_S, Connections
from shared.errors import MalformedAnswer
from shared.web.tls import client_context

MAX_ANSWER_BYTES = 64 * 2**20
FILE = (200, 206)
"""Status of a whole file, and of the rest of one."""

type SocketFactory = Callable[[Any], socket.socket]
"""Makes a socket from an address as getaddrinfo returns it."""


class HttpReply(NamedTuple):
    """An answer of any status."""

    status: int
    content_type: str
    content: bytes
    retry_after: str = ""


type Take = Callable[[bytes], None]
"""Called with each block of a content; an exception ends the transfer."""


class WireRequest(NamedTuple):
    """`timeout_s` is for the whole call."""

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    params: Mapping[str, Any] | None
    timeout_s: float


class Wire(Protocol):
    async def send(self, request: WireRequest) -> HttpReply: ...

    async def receive(self, request: WireRequest, take: Take) -> HttpReply:
        """Send without a time limit; `take` gets a success's content as it arrives, and the reply has none."""
        ...

    async def close(self) -> None: ...


class Plain:
    """Connections of our own."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        self._connections = Connections(base_url, headers)

    async def send(self, request: WireRequest) -> HttpReply:
        async with asyncio.timeout(request.timeout_s):
            return await self._exchange(request, None)

    async def receive(self, request: WireRequest, take: Take) -> HttpReply:
        return await self._exchange(request, take)

    async def _exchange(self, request: WireRequest, take: Take | None) -> HttpReply:
        method, path, body, headers, params, _ = request
        content = _Content(path)
        file = FILE["Range" in headers]
        answer = await self._connections.exchange(
            method, path, params, headers, body, lambda status: take if take and status == file else content.add
        )
        kept = answer.headers
        return HttpReply(answer.status, kept.get("content-type", ""), content.whole(), kept.get("retry-after", ""))

    async def close(self) -> None:
        self._connections.close()


class _Content:
    """Content of an answer. `add` raises MalformedAnswer if it is too long."""

    def __init__(self, path: str) -> None:
        self._path, self._blocks, self._size = path, list[bytes](), 0

    def add(self, block: bytes) -> None:
        self._blocks.append(block)
        self._size += len(block)
        if self._size > MAX_ANSWER_BYTES:
            raise MalformedAnswer(f"the answer of {self._path} is longer than {MAX_ANSWER_BYTES} bytes")

    def whole(self) -> bytes:
        return b"".join(self._blocks)


class Network:
    """aiohttp's connections in one pool without a limit: concurrency is limited where episodes are started."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        ca_file: Path | None,
        socket_factory: SocketFactory | None,
        *,
        keep_cookies: bool,
    ) -> None:
        trusted = client_context(ca_file) if base_url.startswith("https:") else True
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEPALIVE_S, ssl=trusted, socket_factory=socket_factory
        )
        skip = ("User-Agent", "Accept-Encoding")
        self._base_url = base_url
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            skip_auto_headers=skip,
            auto_decompress=False,
            cookie_jar=aiohttp.CookieJar(unsafe=True) if keep_cookies else aiohttp.DummyCookieJar(),
        )

    async def send(self, request: WireRequest) -> HttpReply:
        timeout = aiohttp.ClientTimeout(total=request.timeout_s, sock_connect=CONNECT_S)
        async with self._requested(request, timeout) as answer:
            return _reply(answer.status, answer.headers, await _bounded(answer, request.path))

    async def receive(self, request: WireRequest, take: Take) -> HttpReply:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with self._requested(request, timeout) as answer:
            content = b""
            if answer.status in FILE and answer.status == FILE["Range" in request.headers]:
                async for block in answer.content.iter_any():
                    take(block)
            else:
                content = await _bounded(answer, request.path)
            return _reply(answer.status, answer.headers, content)

    def _requested(
        self, request: WireRequest, timeout: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        method, path, body, headers, params, _ = request
        return self._session.request(
            method,
            self._base_url + path,
            data=body,
            params=params,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
        )

    async def close(self) -> None:
        await self._session.close()


def _reply(status: int, headers: Mapping[str, str], content: bytes) -> HttpReply:
    return HttpReply(status, headers.get("Content-Type", ""), content, headers.get("Retry-After", ""))


async def _bounded(answer: aiohttp.ClientResponse, path: str) -> bytes:
    content = _Content(path)
    async for block in answer.content.iter_any():
        content.add(block)
    return content.whole()
