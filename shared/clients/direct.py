"""An httpx transport in place of the network, so that tests reach an application in their own process.

It is a module of its own because httpx takes longer to import than the rest of the client, and no service needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx


class Direct:
    """Raises the system's errors: TimeoutError, ConnectionError."""

    def __init__(self, base_url: str, headers: Mapping[str, str], transport: httpx.AsyncBaseTransport) -> None:
        self._client = httpx.AsyncClient(base_url=base_url, headers=headers, transport=transport)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> httpx.Response:
        try:
            return await self._client.request(
                method, path, content=body, params=params, headers=headers, timeout=timeout_s
            )
        except httpx.TimeoutException as error:
            raise TimeoutError from error
        except httpx.HTTPError as error:
            raise ConnectionError(type(error).__name__) from error

    async def close(self) -> None:
        await self._client.aclose()
