"""Keep-alive connections to one http:// address: HTTP/1.1 over asyncio and the parser that the services use too.

A call takes a third of the CPU time that it takes with aiohttp, which was nearly half of what an orchestrator used.
TLS, cookies and sockets that the caller makes stay with aiohttp (shared.clients.wires).
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import quote, urlencode, urlsplit

import httptools

from shared.clients.dialing import open_socket

CONNECT_S = 5.0
KEEPALIVE_S = 4.0  # well below the servers' (shared.web.serving): no request uses a connection that is being closed
_PLAIN = re.compile(r"[\w/.~@:-]*", re.ASCII)
_HOST = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?", re.ASCII)
_UNSAFE = re.compile(r"[\r\n\0]")


def is_plain(base_url: str) -> bool:
    """True for http:// with a host and a port that are plain ASCII, and no user."""
    try:
        found = urlsplit(base_url)
        return found.scheme == "http" and bool(_HOST.fullmatch(found.netloc)) and found.port != 0
    except ValueError:
        return False


class NotHttp(Exception):
    """The answer is not HTTP."""


class HttpExchange:
    """One request's answer as it arrives.

    Args:
        admit: called with the status; returns the function that gets each block of the content.
    """

    def __init__(self, admit: Callable[[int], Callable[[bytes], None]]) -> None:
        self._admit = admit
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take: Callable[[bytes], None] | None = None

    def begin(self, status: int) -> None:
        self.status, self._take = status, self._admit(status)

    def take(self, block: bytes) -> None:
        assert self._take is not None
        self._take(block)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Connection(asyncio.Protocol):
    """One connection; it carries one exchange at a time. `on_*` are the parser's callbacks."""

    def __init__(self, pool: Connections) -> None:
        self._pool, self.idle_since = pool, 0.0
        self._exchange: HttpExchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none of asyncio's classes
        self._pool.all.add(self)

    async def carry(self, data: bytes, exchange: HttpExchange) -> None:
        """Send a request and wait for its answer. A call that is cancelled or fails closes the connection."""
        if self.transport.is_closing():
            raise ConnectionResetError(errno.ECONNRESET, "closed")
        self._exchange = exchange
        try:
            self.transport.write(data)
            await exchange.done
        except BaseException:
            self.transport.abort()
            raise
        finally:
            self._exchange = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(NotHttp(str(error)))

    def on_message_begin(self) -> None:
        if self._exchange is None:
            self.transport.abort()  # more than was asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._exchange is not None and (status := self._parser.get_status_code()) >= 200:
            self._exchange.begin(status)

    def on_body(self, block: bytes) -> None:
        if self._exchange is not None:
            self._exchange.take(block)

    def on_message_complete(self) -> None:
        if (exchange := self._exchange) is None or not exchange.status:
            return  # 1xx: the answer follows
        self._exchange = None
        if not self._parser.should_keep_alive():
            self.transport.close()
        if not exchange.done.done():
            exchange.done.set_result(None)

    def eof_received(self) -> None:
        if (exchange := self._exchange) is None or not exchange.status or _FRAMED & exchange.headers.keys():
            return
        if not exchange.done.done():
            exchange.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.all.discard(self)
        if self in self._pool.idle:
            self._pool.idle.remove(self)
        self._fail(exc or ConnectionResetError(errno.ECONNRESET, "closed"))

    def _fail(self, error: BaseException) -> None:
        if self._exchange is not None:
            self._exchange.fail(error)
        self.transport.abort()


_FRAMED = {"content-length", "transfer-encoding"}


class Connections:
    """Connections without a limit of their number: concurrency is limited where requests are made.

    Args:
        base_url: http://HOST[:PORT][/PATH], which `is_plain` accepts.
        headers: sent with every request.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        found = urlsplit(base_url)
        assert found.hostname
        self._host, self._port = found.hostname, found.port or 80
        self._path = found.path
        self._head = _lines({"Host": found.netloc, **headers})
        self.idle: list[_Connection] = []
        self.all: set[_Connection] = set()

    async def exchange(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        body: bytes | None,
        admit: Callable[[int], Callable[[bytes], None]],
    ) -> HttpExchange:
        """Send a request; return its answer once it is complete.

        Raises:
            OSError: no connection, or it was closed before the answer was complete; TimeoutError among them.
            NotHttp: the answer is not HTTP.
            ValueError: a header holds a line break.
        """
        target = self._path + path
        if not _PLAIN.fullmatch(target):
            target = quote(target, safe="/%?&=~@:!$'()*+,;-._")
        if params:
            target += f"?{urlencode(params)}"
        length = "" if body is None and method == "GET" else f"Content-Length: {len(body or b'')}\r\n"
        head = f"{method} {target} HTTP/1.1\r\n{self._head}{_lines(headers)}{length}\r\n".encode("latin-1")
        answer = HttpExchange(admit)
        connection = self._reusable() or await self._connected()
        await connection.carry(head + body if body else head, answer)
        if not connection.transport.is_closing():
            connection.idle_since = asyncio.get_running_loop().time()
            self.idle.append(connection)
        return answer

    def _reusable(self) -> _Connection | None:
        """Return the connection used last, unless it has been idle for too long."""
        now = asyncio.get_running_loop().time()
        while self.idle:
            connection = self.idle.pop()
            if now - connection.idle_since < KEEPALIVE_S and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def _connected(self) -> _Connection:
        made = await open_socket(self._host, self._port, CONNECT_S)
        return (await asyncio.get_running_loop().create_connection(lambda: _Connection(self), sock=made))[1]

    def close(self) -> None:
        for connection in tuple(self.all):
            connection.transport.abort()


def _lines(headers: Mapping[str, str]) -> str:
    """Header lines. Raises ValueError if one holds a line break."""
    for name, value in headers.items():
        if _UNSAFE.search(value):
            raise ValueError(f"the header {name} holds a line break")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
