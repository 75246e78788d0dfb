"""HTTP client for all services: msgpack bodies; foreign errors are translated here.

Plain http goes over connections of its own (shared.clients.connections), for the orchestrator makes thousands of calls
a second; TLS, cookies and sockets made by the caller go over aiohttp. An httpx transport can replace the network, so
that tests reach an application directly. It retries only calls that the caller marks as safe to repeat, and only for
`Unavailable`, through `shared.retry`.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Awaitable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import orjson

from shared import codec
from shared.bounds import MAX_OBJECTS
from shared.clients.connections import NotHttp, is_plain
from shared.clients.wires import FILE, HttpReply, Network, Plain, SocketFactory, Take, Wire, WireRequest
from shared.errors import DecodeError, MalformedAnswer, ServiceUnreachable, TlsFailed, from_problem
from shared.process import descriptors, offload, tracing
from shared.retry import retry

if TYPE_CHECKING:
    from httpx import AsyncBaseTransport

_NO_NAME = (aiohttp.ClientConnectorDNSError, socket.gaierror)
_NO_ADDRESS = (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, UnicodeError)
_JSON, _NONE = "application/json", dict[str, str]()
_MOST_DIGITS = 12


class HttpClient:
    """Client of one service, an async context manager.

    Args:
        timeout_s: default for a whole call.
        ca_file: certificate authorities for https:// (default: the system's).
        transport: replaces the network in tests (e.g. httpx.ASGITransport(app)).
        socket_factory: makes the socket for an address, and may refuse to (PermissionError).
        as_json: send JSON instead of msgpack, for servers of other projects.
        keep_cookies: send back the server's cookies, also to an IP address.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        ca_file: Path | None = None,
        transport: AsyncBaseTransport | None = None,
        socket_factory: SocketFactory | None = None,
        as_json: bool = False,
        keep_cookies: bool = False,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s, self._ca_file, self._transport = timeout_s, ca_file, transport
        self._socket_factory, self._keep_cookies = socket_factory, keep_cookies
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._pack, media_type = (orjson.dumps, _JSON) if as_json else (codec.pack, codec.MEDIA_TYPE)
        self._content_type = {"Content-Type": media_type}
        self._wire: Wire | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        cookies = self._keep_cookies
        if self._transport is not None:
            from shared.clients.direct import Direct

            self._wire = Direct(self.base_url, self._headers, self._transport)
        elif is_plain(self.base_url) and not cookies and self._socket_factory is None:
            self._wire = Plain(self.base_url, self._headers)
        else:
            self._wire = Network(
                self.base_url, self._headers, self._ca_file, self._socket_factory, keep_cookies=cookies
            )
        self._closed = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wire, self._wire = self._wire, None
        self._closed = True
        if wire is not None:
            await wire.close()

    async def get(self, path: str, params: Mapping[str, Any] | None = None, *, attempts: int = 3) -> Any:
        """Raises VolleyError: ServiceUnreachable, or the error in the service's problem body."""
        return await retry(lambda: self._send("GET", path, None, params, None), attempts=attempts)

    async def post(
        self, path: str, body: Any, *, attempts: int = 1, timeout_s: float | None = None, max_objects: int = MAX_OBJECTS
    ) -> Any:
        """Send msgpack, or JSON.

        Set `attempts` > 1 only for requests that may safely be repeated. `max_objects` limits the answer's values.
        """
        return await retry(
            lambda: self._send("POST", path, self._pack(body), None, timeout_s, max_objects), attempts=attempts
        )

    async def put(self, path: str, body: Any) -> Any:
        return await self._send("PUT", path, self._pack(body), None, None)

    async def upload(self, method: str, path: str, content: bytes, media_type: str, params: Mapping[str, str]) -> Any:
        """Send bytes unchanged."""
        request = self._request(method, path, content, params, headers={"Content-Type": media_type})
        return _read(await self._translated(request, self._open().send(request)), path, MAX_OBJECTS)

    async def delete(self, path: str, *, attempts: int = 1) -> Any:
        return await retry(lambda: self._send("DELETE", path, None, None, None), attempts=attempts)

    async def exchange(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> HttpReply:
        """Send one request and return its answer, error answers included; for servers of other projects.

        Raises ServiceUnreachable.
        """
        return await self._exchanged(method, path, self._pack(body) if body is not None else None, None, timeout_s)

    async def exchange_stream(self, path: str, body: Any, take: Take) -> HttpReply:
        """POST as `exchange`, without a time limit; `take` gets a success's content as it arrives, and may raise."""
        request = self._request("POST", path, self._pack(body))
        return await self._translated(request, self._open().receive(request, take))

    async def download(self, path: str, take: Take, *, start: int = 0) -> None:
        """Receive the bytes of a file from `start` on, as they arrive; the caller limits their number and the time.

        Raises as `get`, and MalformedAnswer if the answer does not start there.
        """
        request = self._request("GET", path, headers={"Range": f"bytes={start}-"} if start else _NONE)
        reply = await self._translated(request, self._open().receive(request, take))
        if reply.status not in FILE:
            _read(reply, path, MAX_OBJECTS)
        if reply.status != FILE[bool(start)]:
            raise MalformedAnswer(f"{self.base_url}{path} answered {reply.status} to a request for a file")

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        params: Mapping[str, Any] | None,
        timeout_s: float | None,
        max_objects: int = MAX_OBJECTS,
    ) -> Any:
        answer = await self._exchanged(method, path, body, params, timeout_s)
        return await offload.by_size(len(answer.content), lambda: _read(answer, path, max_objects))

    async def _exchanged(
        self, method: str, path: str, body: bytes | None, params: Mapping[str, Any] | None, timeout_s: float | None
    ) -> HttpReply:
        request = self._request(method, path, body, params, timeout_s)
        return await self._translated(request, self._open().send(request))

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] = _NONE,
    ) -> WireRequest:
        whole = {**(_NONE if body is None else self._content_type), **tracing.headers(), **headers}
        return WireRequest(method, path, body, whole, params, timeout_s or self._timeout_s)

    def _open(self) -> Wire:
        """Return the connections. Raises ServiceUnreachable once they are closed, e.g. when the service was removed."""
        if self._closed:
            raise ServiceUnreachable(f"{self.base_url} cannot be reached: this client is closed")
        assert self._wire is not None, "enter the client first"
        return self._wire

    async def _translated[T](self, request: WireRequest, exchange: Awaitable[T]) -> T:
        """Translate network errors of a request."""
        what = f"{request.method} {self.base_url}{request.path}"
        try:
            return await exchange
        except TimeoutError as error:
            raise ServiceUnreachable(f"{what} did not answer in time") from error
        except aiohttp.ClientSSLError as error:
            raise TlsFailed(
                f"{what}: {_tls_reason(error)}",
                "check services.tls: ca_file must contain the authority of that certificate",
            ) from error
        except (aiohttp.ClientError, NotHttp, OSError, UnicodeError) as error:
            if (reason := descriptors.exhausted(error)) is not None:
                raise ServiceUnreachable(f"{what}: {reason}", descriptors.HINT) from error
            raise ServiceUnreachable(f"{what}: {_reason(error)}", _hint(error)) from error


MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""Exceptions from reading an answer whose fields are missing, of another type, or out of bounds."""


def _reason(error: aiohttp.ClientError | NotHttp | OSError | UnicodeError) -> str:
    """Describe a network error without its address, which the caller adds."""
    if isinstance(error, _NO_NAME):
        return "the host name cannot be resolved"
    if isinstance(error, _NO_ADDRESS):
        return "this is not an http address"
    number = getattr(error, "errno", None)
    if isinstance(error, aiohttp.ServerDisconnectedError) or number in (errno.ECONNRESET, errno.EPIPE):
        return "the connection was closed before the answer was complete"
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError | NotHttp):
        return "the answer is not HTTP, or incomplete"
    if number == errno.ECONNREFUSED:
        return "nothing listens there"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _hint(error: Exception) -> str:
    wrong_address = isinstance(error, (*_NO_NAME, *_NO_ADDRESS))
    return "check the address" if wrong_address else "is the service running?"


def _tls_reason(error: aiohttp.ClientSSLError) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        return f"its certificate was rejected: {getattr(cause, 'verify_message', None) or cause}"
    return f"no TLS connection can be made: {getattr(error.os_error, 'reason', None) or error.os_error}"


def _read(answer: HttpReply, path: str, max_objects: int) -> Any:
    """Return the decoded body of a success. Raises the error of a problem body, or MalformedAnswer."""
    if answer.status < 300:
        return _decode(answer, path, max_objects) if answer.content else None
    try:
        value = _decode(answer, path, max_objects)
    except DecodeError:
        value = None
    body = value if isinstance(value, dict) else {}
    if (wait_s := _seconds(answer.retry_after)) is not None:
        body = {"retry_after_s": wait_s, **body}
    raise from_problem(answer.status, body)


def _seconds(retry_after: str) -> float | None:
    """Parse a Retry-After of seconds or a date; None for anything else."""
    if retry_after.isdecimal():
        return float(retry_after[:_MOST_DIGITS])  # float() makes infinity of more than 300 digits
    try:
        at = parsedate_to_datetime(retry_after).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, at - time.time())


def _decode(answer: HttpReply, path: str, max_objects: int) -> Any:
    try:
        return codec.by_type(answer.content_type, answer.content, f"the answer of {path}", max_objects, "replace")
    except DecodeError as error:
        raise MalformedAnswer(error.detail, error.hint) from error
