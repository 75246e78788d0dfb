"""HTTP client of a Volley service, with bounded retries of transient failures."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import ssl
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
ATTEMPTS = 8
_TRANSIENT = (429, 502, 503, 504)
_BACKOFF_S, _BACKOFF_CAP_S = 0.2, 5.0


class ServiceError(RuntimeError):
    """A service refused a request, or could not be reached.

    `status` is the HTTP status, 0 if there was no answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[ServiceError], tuple[str, int]]:
        return type(self), (str(self), self.status)  # Ray pickles errors


class Service:
    """Client of one service, for one event loop: `async with Service(url, "service") as service`.

    Args:
        role: `service` or `admin`. The token is read from the file that VOLLEY_TOKEN_FILE_SERVICE or
            VOLLEY_TOKEN_FILE_ADMIN names; without one, none is sent.
    """

    def __init__(self, url: str, role: str = "service", timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        token = read_token(role)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        verify = _tls(os.environ.get("VOLLEY_CA_FILE")) if self.url.startswith("https:") else False
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=timeout_s,
            verify=verify,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Any, *, attempts: int = ATTEMPTS) -> Any:
        """Send JSON, return the answer's. Repeats transient failures, so the request must be idempotent.

        Raises:
            ServiceError: the service refused, or failed `attempts` times.
        """
        return await self._call("POST", path, body, attempts)

    async def delete(self, path: str) -> None:
        await self._call("DELETE", path, None, 1)

    async def _call(self, method: str, path: str, body: Any, attempts: int) -> Any:
        for attempt in range(1, attempts + 1):
            try:
                answer = await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                failure, wait_s = ServiceError(f"{self.url}{path} cannot be reached: {error!r}"), None
            else:
                if answer.is_success:
                    return answer.json() if answer.content else None
                failure = ServiceError(f"{self.url}{path}: {_problem(answer)}", answer.status_code)
                if answer.status_code not in _TRANSIENT:
                    raise failure
                wait_s = _retry_after(answer)
            if attempt == attempts:
                raise failure
            backoff_s = min(_BACKOFF_CAP_S, _BACKOFF_S * 2**attempt) * random.uniform(0.5, 1.0)
            await asyncio.sleep(backoff_s if wait_s is None else wait_s)
        raise ValueError(f"attempts={attempts} must be at least 1")


def read_token(role: str) -> str | None:
    """Return the token of a role, or None. The admin token also serves where the role's own is not given."""
    for name in (role, "admin"):
        if file := os.environ.get(f"VOLLEY_TOKEN_FILE_{name.upper()}"):
            return Path(file).read_text(encoding="utf-8").strip()
    return None


def wait_for(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end from code that is not async, even inside a running event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(make())).result()


@functools.cache
def _tls(ca_file: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


def _problem(answer: httpx.Response) -> str:
    """Return detail and hint of a problem body (RFC 9457)."""
    try:
        body = answer.json()
    except ValueError:
        return f"HTTP {answer.status_code}: {answer.text[:200]}"
    detail, hint = (
        (body.get("detail") or body.get("title"), body.get("hint")) if isinstance(body, dict) else (body, None)
    )
    return f"HTTP {answer.status_code}: {detail}" + (f" ({hint})" if hint else "")


def _retry_after(answer: httpx.Response) -> float | None:
    try:
        return min(60.0, float(answer.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
