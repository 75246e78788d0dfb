"""HTTP connection that limits what a client may cost, which uvicorn's protocol over httptools does not.

- The head of a request must be complete within `header_timeout_s` of its first byte (or of the connection), and small.
- A chunked body is refused when its chunks announce more than the limit (shared.web.chunks).
- Data that the parser buffers without passing it on (a value, a chunk extension, an endless trailer) is limited.
- If a request is answered before it has arrived, a short rest of it is read and discarded. The answer announces that
  the connection closes if more is to come, or an unknown amount (a chunked body); a rest that arrives late closes it
  too.
- A connection that ends with a refusal discards what still arrives, up to `_DISCARDED_BYTES` and `body_timeout_s`.
  Closing it with unread bytes would make the system reset it, and the client would lose the answer.
- A client that does not read its response is disconnected after `body_timeout_s`. On keep-alive connections, the timer
  for the end of a response starts after the keep-alive time.
- The number of connections, and of pipelined requests on one of them, is limited.

Bodies are limited where they are read (shared.web.http). Every cut is counted by its reason; a refusal names it in a
problem body (RFC 9457).
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from shared.process import telemetry
from shared.services_schema import Limits
from shared.web.chunks import MAX_ASIDE, MAX_LINE, ChunkError, Chunks
from shared.web.problems import MEDIA_TYPE, problem_body

MAX_HEAD_BYTES = 64 * 1024
MAX_FIELD_BYTES = 8 * 1024
"""Largest target or header of a request. What parses one may take more than linear time. Cookies may be longer: no
service parses them (shared.web.edge), and browsers send those of all services of a machine."""
MAX_HEADERS = 100
MAX_AHEAD = 8
WHOLE_BODY = "volley.whole_body"
"""Scope extension: the request's body has arrived, so reading it does not wait."""
_HELD_BACK = 64 * 1024
_CLOSE = (b"connection", b"close")
_END = b"\r\n\r\n"  # of a head
_REST_BYTES = 64 * 1024
_REST_S = 1.0
_DISCARDED_BYTES = 256 * 2**20
_DETAILS = {
    "slow head": "the head of the request did not arrive in time (services.limits.header_timeout_s)",
    "large head": (
        f"the head of the request exceeds {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers, or its target or one header"
        f" {MAX_FIELD_BYTES} bytes"
    ),
    "many ahead": f"more than {MAX_AHEAD} requests were pipelined",
    "held back": f"a value, a chunk extension or a trailer exceeds {_HELD_BACK} bytes",
    "malformed": "the request line, a header or the body's framing is not valid HTTP/1.1",
    "malformed chunk": "the body does not follow its chunked Transfer-Encoding",
    "long chunk line": (
        f"a chunk's size, an extension or a trailer exceeds {MAX_LINE} bytes, or all of them {MAX_ASIDE}"
    ),
    "large body": "the chunks announce more than the body may have (services.limits.max_body_bytes)",
}
"""Details of refusals, by reason."""
_CUT = telemetry.Counter(
    "volley_http_connections_cut", "Connections ended by a limit", ["reason"], registry=telemetry.REGISTRY
)


class _HeadTooLarge(Exception):
    """Raised in a parser's callback; answered with 431."""


class _Unframed(Exception):
    """Raised in a parser's callback for a head with a body that does not end with CR LF CR LF; answered with 400."""


class Connection(HttpToolsProtocol):
    """HTTP connection. Args: limits: see the module; n_max: number of connections; the others as uvicorn's."""

    def __init__(self, limits: Limits, n_max: int, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits, self._n_max = limits, n_max
        self._service, self.app = self.app, self._answer
        self.url = b""  # of the newest request
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._head_bytes = self._longest_field = self._held_back = self._discarded = 0
        self._in_head = False  # the head of a request has started
        self._busy = False  # a request with a complete head is not answered yet
        self._body_open = False  # the body of the newest request has not arrived
        self._ending = False  # an answer has announced that the connection closes
        self._tail = b""  # the last bytes of an incomplete head
        self._head_ends = False  # with the data that the parser gets now
        self._body_left = 0  # remaining bytes of a body with a declared length
        self._chunks: Chunks | None = None  # of a chunked body
        self._discard_until: float | None = None  # set once the connection only discards what arrives

    def connection_made(self, transport: asyncio.Transport) -> None:  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > self._n_max:
            self._cut("full")
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._write_timer, self._rest_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()

    # receiving
    def data_received(self, data: bytes) -> None:
        """Pass heads and bodies to the parser one by one, so that a body's framing is checked before it is used."""
        while data and not self.transport.is_closing():
            if self._discard_until is not None:
                self._discard(len(data))
                return
            try:
                n = self._next_part(data)
            except ChunkError as error:
                self._refuse(error.reason, error.status)
            else:
                self._feed(data[:n])
                data = data[n:]
                if (now := self.transport.get_protocol()) is not self:  # upgraded to a WebSocket
                    if data and isinstance(now, asyncio.Protocol):
                        now.data_received(data)
                    return

    def _next_part(self, data: bytes) -> int:
        """Return how many bytes of `data` belong to the current head or body. Raises ChunkError."""
        if self._chunks is not None:
            n = self._chunks.take(data)
            if self._chunks.ended:
                self._chunks = None
            return n
        if self._body_left:
            n = min(self._body_left, len(data))
            self._body_left -= n
            return n
        end = (self._tail + data[: len(_END)]).find(_END) if self._tail else -1
        n = end + len(_END) - len(self._tail) if end >= 0 else data.find(_END) + len(_END)
        self._head_ends = n >= len(_END) or end >= 0
        n = n if self._head_ends else len(data)
        self._tail = b"" if self._head_ends else (self._tail + data)[1 - len(_END) :]
        return n

    def _feed(self, data: bytes) -> None:
        self._held_back += len(data)
        idle = not (self._busy or self._body_open)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._held_back > _HELD_BACK:
            self._refuse("held back", 431)
        elif idle and not self._busy and self._head_timer is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._longest_field = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url), len(self.url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        n = len(name) + len(value)
        self._count_head(n, 0 if name.lower() == b"cookie" else n)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:
            raise _HeadTooLarge
        self._expect_body()
        self._held_back, self._in_head, self._busy = 0, False, True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        # set if this head arrived together with the rest of a body that was answered early
        self._unset_keepalive_if_required()
        super().on_headers_complete()  # raises for a malformed target, which has no cycle
        self._body_open = True

    def _expect_body(self) -> None:
        """Set up the body by the headers; the parser rejects contradictory ones."""
        headers = dict(self.headers)
        if b"transfer-encoding" in headers:
            self._chunks = Chunks(self._limits.max_body_bytes)
        elif (length := headers.get(b"content-length", b"")).isdigit():
            self._body_left = int(length)
        if not self._head_ends and (self._chunks is not None or self._body_left):
            raise _Unframed

    def on_body(self, body: bytes) -> None:
        self._held_back = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held_back, self._body_open = 0, False
        super().on_message_complete()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None
            self._await_next()

    def _count_head(self, n: int, field: int) -> None:
        """Count n bytes that have arrived, the end of a target or header that has `field` bytes so far."""
        self._held_back = 0
        self._head_bytes += n
        self._longest_field = max(self._longest_field, field)
        if self._has_large_head():
            raise _HeadTooLarge

    def _has_large_head(self) -> bool:
        return (
            self._head_bytes > MAX_HEAD_BYTES
            or self._longest_field > MAX_FIELD_BYTES
            or len(self.headers or ()) > MAX_HEADERS
        )

    def _await_next(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._refuse, "slow head", 408)

    # sending
    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        async def announced(message: Any) -> None:
            if message["type"] == "http.response.start" and self._body_open and scope is self.cycle.scope:
                await self._start_early(self.cycle, send, message)
            else:
                await send(message)

        scope["extensions"] = {WHOLE_BODY: {}} if scope is not self.cycle.scope or not self._body_open else {}
        await self._service(scope, receive, announced)

    async def _start_early(self, cycle: RequestResponseCycle, send: Any, message: Any) -> None:
        """Start an answer before its request has arrived.

        The rest's timer closes the connection: closing at once, with bytes on their way to it, would make the system
        reset it, and the client would lose the answer.
        """
        self._ending = not cycle.keep_alive or self._chunks is not None or self._body_left > _REST_BYTES
        if self._ending and _CLOSE not in (headers := list(message.get("headers", ()))):
            message = {**message, "headers": [*headers, _CLOSE]}  # uvicorn 0.35 does not add it
        await send(message)
        if self._ending:
            cycle.keep_alive = True

    def on_response_complete(self) -> None:
        waiting, answered_early = bool(self.pipeline), self._body_open and self.cycle.response_complete
        super().on_response_complete()
        self._busy = waiting
        if self.transport.is_closing():
            self._expect_reader()
        elif self._ending and not answered_early:
            self._close()  # the rest arrived while the answer was written
        elif answered_early and self._ending:
            self._end_by_discarding()
        elif answered_early:
            self._unset_keepalive_if_required()
            self._rest_timer = self.loop.call_later(_REST_S, self._close)
        elif self._in_head and not waiting:
            self._unset_keepalive_if_required()
            self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_expecting_reader()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_expecting_reader()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self._expect_reader()
            self._await_next()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request; uvicorn calls it for whatever the parser rejects."""
        if self._has_large_head():
            self._refuse("large head", 431)
        elif len(self.pipeline) >= MAX_AHEAD:
            self._refuse("many ahead", 431)
        else:
            self._refuse("malformed", 400)

    def _expect_reader(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.body_timeout_s, self._cut_if_unread)

    def _stop_expecting_reader(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _cut_if_unread(self) -> None:
        self._write_timer = None
        if self.transport.get_write_buffer_size():
            self._cut("slow reader")

    def _refuse(self, reason: str, status: int) -> None:
        """Send a short answer, and end the connection."""
        if self.transport.is_closing() or self._discard_until is not None:
            return
        _CUT.labels(reason).inc()
        if self._body_open and self.cycle.response_started:
            self._close()  # the request that is still arriving is already answered
            return
        title = HTTPStatus(status).phrase
        problem = {"type": "about:blank", "title": title, "status": status, "detail": _DETAILS[reason]}
        body = problem_body(problem, self.url.partition(b"?")[0].decode("latin-1"))
        head = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
        self.transport.write(STATUS_LINE[status] + head + body)
        if self.pipeline:  # an earlier request is not answered yet
            self._close()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._end_by_discarding()

    def _end_by_discarding(self) -> None:
        """Close the connection once the client has closed it, or has sent nothing for a while."""
        self._unset_keepalive_if_required()
        self._discard_until = self.loop.time() + self._limits.body_timeout_s
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._discard(0)

    def _discard(self, n: int) -> None:
        """Count n bytes that have arrived, and wait for more."""
        self._discarded += n
        left_s = (self._discard_until or 0) - self.loop.time()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        if self._discarded > _DISCARDED_BYTES or left_s <= 0:
            self._close()
        else:
            self._rest_timer = self.loop.call_later(min(_REST_S, left_s), self._close)

    def _close(self) -> None:
        """Close the connection; the client may still read what was written, for `body_timeout_s`."""
        self.transport.close()
        self._expect_reader()

    def _cut(self, reason: str) -> None:
        _CUT.labels(reason).inc()
        self.transport.abort()
