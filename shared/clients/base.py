"""The one HTTP client: httpx's interface over aiohttp's transport, msgpack bodies, foreign errors translated here.

Retries: only what the caller marks as safe to repeat, only for `Unavailable`, in `shared.retry`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import aiohttp
import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from shared import codec
from shared.errors import DecodeError, ServiceUnreachable, from_problem
from shared.retry import retry


class HttpClient:
    """Calls one service. Use as an async context manager.

    Args:
        transport: replaces the network in tests (e.g. httpx.ASGITransport(app)).
    """

    def __init__(
        self, base_url: str, *, token: str | None = None, timeout_s: float = 60.0, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.base_url = base_url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.AsyncClient(
            base_url=base_url, headers=headers, timeout=timeout_s, transport=transport or _transport(), trust_env=False
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def get(self, path: str, params: dict[str, Any] | None = None, *, attempts: int = 3) -> Any:
        """Raises VolleyError: ServiceUnreachable, or what the service's problem body says."""
        return await retry(lambda: self._send("GET", path, None, params, None), attempts=attempts)

    async def post(self, path: str, body: Any, *, attempts: int = 1, timeout_s: float | None = None) -> Any:
        """Sends msgpack. Give `attempts` > 1 only for requests that may safely be repeated."""
        return await retry(lambda: self._send("POST", path, codec.pack(body), None, timeout_s), attempts=attempts)

    async def delete(self, path: str, *, attempts: int = 1) -> Any:
        return await retry(lambda: self._send("DELETE", path, None, None, None), attempts=attempts)

    async def _send(self, method: str, path: str, body: bytes | None, params: dict[str, Any] | None, timeout_s: float | None) -> Any:
        headers = {"Content-Type": codec.MEDIA_TYPE} if body is not None else {}
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        try:
            answer = await self._client.request(method, path, content=body, params=params, headers=headers, timeout=timeout)
        except httpx.TimeoutException as error:
            raise ServiceUnreachable(f"{method} {self.base_url}{path} did not answer in time") from error
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            raise ServiceUnreachable(f"{method} {self.base_url}{path}: {type(error).__name__}", "is the service running?") from error
        value = _decode(answer)
        if answer.is_success:
            return value
        raise from_problem(answer.status_code, value if isinstance(value, dict) else {})


def _decode(answer: httpx.Response) -> Any:
    if not answer.content:
        return None
    if answer.headers.get("content-type", "").startswith(codec.MEDIA_TYPE):
        return codec.unpack(answer.content, "answer")
    try:
        return orjson.loads(answer.content)
    except orjson.JSONDecodeError as error:
        if answer.is_success:
            raise DecodeError(f"answer of {answer.url} is not valid JSON") from error
        return None


def _transport() -> AiohttpTransport:
    """One connection pool without a limit of its own: concurrency is bounded where episodes are started."""
    return AiohttpTransport(client=lambda: aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=20)))
