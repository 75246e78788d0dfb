"""Serve chunks over HTTP, from a trainer or from a server that shares the chunks it has pulled.

Invariants: only chunks in the folder are sent. A source sends to a limited number of clients at once and refuses
others, who try another source: no uplink carries a copy for every server. One address never has all of a source's
transfers, and no transfer lasts longer than a client would wait for it.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import blake3
from fastapi import Path, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from shared.errors import InputError, Unavailable
from shared.process import telemetry
from shared.published.manifest import is_digest

MAX_TRANSFERS = 8
BUSY_S = 0.1
SLOW_S, SLOWEST_BYTES_PER_S = 5.0, 2**18
"""Time limit of a transfer: SLOW_S, and the time that its bytes take at the slowest rate; then both sides end it."""
_FOR_OTHERS = 2
_BLOCK_BYTES = 2**19
_RANGE = re.compile(r"bytes=(\d{1,12})-")
_SENT = telemetry.Counter("volley_weights_sent_bytes", "Bytes of weights sent to others", registry=telemetry.REGISTRY)
_REFUSED = telemetry.Counter(
    "volley_weights_refused_transfers",
    "Requests for weights refused because enough were running, or cut off because the client did not read",
    registry=telemetry.REGISTRY,
)

type ChunkDigest = Annotated[str, Path(openapi_examples={"chunk": {"value": blake3.blake3(b"").hexdigest()}})]


class Uplink:
    """Chunks that a service sends. Args: read: returns a chunk by its digest; it blocks, and raises NotFound."""

    def __init__(self, read: Callable[[str], bytes], max_transfers: int = MAX_TRANSFERS) -> None:
        self._read, self._max_transfers = read, max_transfers
        self._of_address = Counter[str]()

    async def answer(self, request: Request, digest: str) -> Response:
        """Answer with a chunk, or its rest for `Range: bytes=N-`.

        Raises InputError, NotFound, and Unavailable while too many are served.
        """
        if not is_digest(digest):
            raise InputError("name a chunk by its blake3 digest, 64 hexadecimal characters")
        address, n_transfers = request.client.host if request.client else "", self._of_address.total()
        most = max(1, self._max_transfers - _FOR_OTHERS)
        if n_transfers >= self._max_transfers or self._of_address[address] >= most:
            _REFUSED.inc()
            raise Unavailable(f"{n_transfers} transfers are already running", "ask another source", BUSY_S)
        self._of_address[address] += 1
        try:
            data = await asyncio.to_thread(self._read, digest)
            start = _start(request.headers.get("range"), len(data))
        except BaseException:
            self._ended(address)
            raise
        return _Transfer(data, start, lambda: self._ended(address))

    def _ended(self, address: str) -> None:
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]


class _Transfer(Response):
    """Send block by block, each after the client has read the last one; a client that does not read is disconnected."""

    media_type = "application/octet-stream"

    def __init__(self, data: bytes, start: int, ended: Callable[[], None]) -> None:
        headers = {"Content-Length": str(len(data) - start)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        super().__init__(None, 206 if start else 200, headers)
        self._data, self._start, self._ended = memoryview(data), start, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(SLOW_S + (len(self._data) - self._start) / SLOWEST_BYTES_PER_S):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                for at in range(self._start, len(self._data), _BLOCK_BYTES):
                    block = self._data[at : at + _BLOCK_BYTES]
                    await send({"type": "http.response.body", "body": block, "more_body": True})
                    _SENT.inc(len(block))
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:  # an incomplete answer ends its connection
            _REFUSED.inc()
        finally:
            self._ended()


def _start(header: str | None, size: int) -> int:
    """Return the start of a Range to the end; other Ranges may be ignored (RFC 9110, 14.2).

    Raises InputError if it starts beyond the end.
    """
    match = _RANGE.fullmatch(header or "")
    start = int(match[1]) if match else 0
    if start and start >= size:
        raise InputError(f"the range starts at {start} of {size} bytes")
    return start
