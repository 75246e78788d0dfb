"""Answer of server-sent events, which are sent while they are produced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from services.rollout.api.generation import ClientGone
from shared.errors import VolleyError, problem

type Put = Callable[[bytes], None]
type Produce = Callable[[Put, Receive], Awaitable[None]]
type Fail = Callable[[Mapping[str, Any]], bytes]


class EventStream(Response):
    """Response whose events `produce` puts. An error before the first event is answered like that of any other route.

    Args:
        produce: puts encoded events; gets the ASGI channel that reports the client's disconnect. Raises ClientGone.
        fail: encodes a later error as the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, produce: Produce, fail: Fail) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce, self._fail = produce, fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events, failed = asyncio.Queue[bytes](), list[VolleyError]()

        async def work() -> None:
            try:
                await self._produce(events.put_nowait, receive)
            except ClientGone:
                pass
            except VolleyError as error:
                failed.append(error)
            finally:
                events.put_nowait(b"")

        working = asyncio.ensure_future(work())
        try:
            data = await events.get()
            if data or not failed:
                await self._send_all(data, events, failed, send)
            await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        if not data and failed:
            raise failed[0]

    async def _send_all(self, data: bytes, events: asyncio.Queue[bytes], failed: list[VolleyError], send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await events.get()
        last = self._fail(problem(failed[0])) if failed else b""
        await send({"type": "http.response.body", "body": last, "more_body": False})
