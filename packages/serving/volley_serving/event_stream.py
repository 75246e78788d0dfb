"""Response of server-sent events, sent as they are produced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from services.rollout.api.generation import ClientGone
from shared.errors import VolleyError


class EventBuffer:
    """Receiver of events. `n_bytes` counts bytes that the client has not read yet."""

    def __init__(self) -> None:
        self._events = asyncio.Queue[bytes]()
        self.n_bytes = 0

    def __call__(self, data: bytes) -> None:
        self.n_bytes += len(data)
        self._events.put_nowait(data)

    async def take(self) -> bytes:
        data = await self._events.get()
        self.n_bytes -= len(data)
        return data


type Produce = Callable[[EventBuffer, Receive], Awaitable[None]]
type Fail = Callable[[VolleyError], bytes]


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
        events, failed = EventBuffer(), list[VolleyError]()

        async def work() -> None:
            try:
                await self._produce(events, receive)
            except ClientGone:
                pass
            except VolleyError as error:
                failed.append(error)
            finally:
                events(b"")

        working = asyncio.ensure_future(work())
        try:
            data = await events.take()
            if not data:
                await working
            if data or not failed:
                await self._send_all(data, events, send)
                await working  # raises before the end of the answer, so that the client sees that it is cut
                last = self._fail(failed[0]) if failed else b""
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        if not data and failed:
            raise failed[0]

    async def _send_all(self, data: bytes, events: EventBuffer, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await events.take()
