"""An httpx transport in place of the network, so that tests reach an application in their own process.

It is a module of its own because httpx takes longer to import than the rest of the client, and no service needs it.
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from shared.clients.connections import CONNECT_S
from shared.clients.wires import FILE, HttpReply, Take, WireRequest


class Direct:
    """Raises the system's errors: TimeoutError, ConnectionError."""

    def __init__(self, base_url: str, headers: Mapping[str, str], transport: httpx.AsyncBaseTransport) -> None:
        self._client = httpx.AsyncClient(base_url=base_url, headers=headers, transport=transport)

    async def send(self, request: WireRequest) -> HttpReply:
        method, path, body, headers, params, timeout_s = request
        try:
            answer = await self._client.request(
                method, path, content=body, params=params, headers=headers, timeout=timeout_s
            )
        except httpx.TimeoutException as error:
            raise TimeoutError from error
        except httpx.HTTPError as error:
            raise ConnectionError(type(error).__name__) from error
        kept = answer.headers
        return HttpReply(answer.status_code, kept.get("Content-Type", ""), answer.content, kept.get("Retry-After", ""))

    async def receive(self, request: WireRequest, take: Take) -> HttpReply:
        reply = await self.send(request._replace(timeout_s=CONNECT_S))
        if reply.status == FILE["Range" in request.headers]:
            take(reply.content)
            reply = reply._replace(content=b"")
        return reply

    async def close(self) -> None:
        await self._client.aclose()
