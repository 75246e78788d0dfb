"""The HTTP client of the hot path: `HttpClient`'s interface on aiohttp itself.

httpx's request and response objects cost about 450 µs of CPU a call, three times what aiohttp needs for the whole of it,
and the orchestrator makes thousands of calls a second. With a `transport` (tests) it is `HttpClient` unchanged.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import aiohttp
import httpx
import orjson

from shared import codec
from shared.clients.base import HttpClient
from shared.errors import DecodeError, ServiceUnreachable, from_problem

_CONNECT_TIMEOUT_S = 5.0
_KEEPALIVE_S = 4.0  # below uvicorn's default of 5 s, so that no request meets a connection that is being closed
_MSGPACK = {"Content-Type": codec.MEDIA_TYPE}


class DirectClient(HttpClient):
    """One pool without a limit of its own: concurrency is bounded where episodes are started."""

    def __init__(
        self, base_url: str, *, token: str | None = None, timeout_s: float = 60.0, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        super().__init__(base_url, token=token, timeout_s=timeout_s, transport=transport)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s, self._direct = timeout_s, transport is None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if self._direct:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            skip = ("User-Agent", "Accept-Encoding")
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, skip_auto_headers=skip)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()
        await super().__aexit__(kind, error, trace)

    async def _send(self, method: str, path: str, body: bytes | None, params: dict[str, Any] | None, timeout_s: float | None) -> Any:
        if self._session is None:
            return await super()._send(method, path, body, params, timeout_s)
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        headers = None if body is None else _MSGPACK
        try:
            async with self._session.request(
                method, self.base_url + path, data=body, params=params, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                status, content_type, content = answer.status, answer.headers.get("Content-Type", ""), await answer.read()
        except TimeoutError as error:
            raise ServiceUnreachable(f"{method} {self.base_url}{path} did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServiceUnreachable(f"{method} {self.base_url}{path}: {type(error).__name__}", "is the service running?") from error
        return _read(status, content_type, content, path)


def _read(status: int, content_type: str, content: bytes, path: str) -> Any:
    """The decoded body of a success. Raises what a problem body says, or DecodeError."""
    if status < 300:
        return _decode(content_type, content, path) if content else None
    try:
        value = _decode(content_type, content, path)
    except DecodeError:
        value = None
    raise from_problem(status, value if isinstance(value, dict) else {})


def _decode(content_type: str, content: bytes, path: str) -> Any:
    if content_type.startswith(codec.MEDIA_TYPE):
        return codec.unpack(content, "answer")
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise DecodeError(f"the answer of {path} is not valid JSON") from error
