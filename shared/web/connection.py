"""One HTTP connection with bounds on what a client may cost: uvicorn's protocol over httptools, which has none of
these.

- The head of a request must be whole within `header_timeout_s` of its first byte (or of the connection), and small.
- A chunked body is refused when its chunks announce more than it may have (shared.web.chunks).
- What the parser holds back and has not handed over (a value, a chunk extension, a trailer that never ends) is bounded.
- Of a request that is answered before it has arrived, a short rest is read away. The answer says that the connection
  ends where more is to come, or nobody knows how much (a chunked body); a rest that comes late ends it too.
- A connection that ends with a refusal discards what still arrives, up to `_DISCARDED_BYTES` and `body_timeout_s`. If
  it were closed with unread bytes, the system would reset it, and the client would lose the answer.
- A client that does not read its response is cut off after `body_timeout_s`, which for the end of it, when the
  connection is kept, begins after the keep-alive time.
- Only so many connections at once, and only so many requests sent ahead on one.

Bodies are bounded where they are read (shared.web.http). Every cut is counted by its reason; a refusal tells it in a
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
MAX_HEADERS = 100
MAX_AHEAD = 8
WHOLE_BODY = "volley.whole_body"
"""Extension of a request's scope: its body has arrived, so that reading it waits for nothing."""
_HELD_BACK = 64 * 1024
_CLOSE = (b"connection", b"close")
_END = b"\r\n\r\n"  # of a head
_REST_BYTES = 64 * 1024
_REST_S = 1.0
_DISCARDED_BYTES = 256 * 2**20
_DETAILS = {
    "slow head": "the head of the request did not arrive in time (services.limits.header_timeout_s)",
    "large head": f"the head of the request exceeds {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers",
    "many ahead": f"more than {MAX_AHEAD} requests were sent ahead of their answers",
    "held back": f"a value, a chunk extension or a trailer exceeds {_HELD_BACK} bytes",
    "malformed": "the request is not valid HTTP/1.1: its request line, a header, or the framing of its body",
    "malformed chunk": "the body is not framed in chunks as its Transfer-Encoding says",
    "long chunk line": (
        f"a chunk's size, an extension or a trailer exceeds {MAX_LINE} bytes, or all of them {MAX_ASIDE}"
    ),
    "large body": "the chunks announce more than the body may have (services.limits.max_body_bytes)",
}
"""Of every refusal, by its reason."""
_CUT = telemetry.Counter(
    "volley_http_connections_cut", "Connections ended by a limit", ["reason"], registry=telemetry.REGISTRY
)


class _HeadTooLarge(Exception):
    """Raised in a parser's callback; ends as the answer 431."""


class _Unframed(Exception):
    """Raised in a parser's callback: a head with a body ends where no line of CR LF does. Ends as the answer 400."""


class Connection(HttpToolsProtocol):
    """Args: limits: see the module; n_max: connections at once; the others as uvicorn's."""

    def __init__(self, limits: Limits, n_max: int, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits, self._n_max = limits, n_max
        self._service, self.app = self.app, self._answer
        self.url = b""  # of the newest request
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._head_bytes = self._held_back = self._discarded = 0
        self._in_head = False  # the head of a request has begun
        self._busy = False  # a request with a whole head has not been answered yet
        self._body_open = False  # the body of the newest request is still to come
        self._ending = False  # an answer has said that the connection ends with it
        self._tail = b""  # the last bytes of a head that has not ended
        self._head_ends = False  # with what the parser is given now
        self._body_left = 0  # bytes of a body whose length was declared
        self._chunks: Chunks | None = None  # of a body that comes in chunks
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

    # what arrives
    def data_received(self, data: bytes) -> None:
        """The parser gets heads and bodies one by one, so that what frames a body is seen here before it is
        believed.
        """
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
                if (now := self.transport.get_protocol()) is not self:  # it is a WebSocket's from here on
                    if data and isinstance(now, asyncio.Protocol):
                        now.data_received(data)
                    return

    def _next_part(self, data: bytes) -> int:
        """How many bytes of `data` belong to the head or the body that is arriving. Raises ChunkError."""
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
        self._head_bytes, self._in_head = 0, True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:
            raise _HeadTooLarge
        self._expect_body()
        self._held_back, self._in_head, self._busy = 0, False, True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        # armed, if this head came in one piece with the rest of a body answered early
        self._unset_keepalive_if_required()
        super().on_headers_complete()  # raises for a target it cannot read, which has no cycle
        self._body_open = True

    def _expect_body(self) -> None:
        """By the headers, whose contradictions the parser refuses."""
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

    def _count_head(self, n: int) -> None:
        self._held_back = 0
        self._head_bytes += n
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            raise _HeadTooLarge

    def _await_next(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._refuse, "slow head", 408)

    # what leaves
    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        async def announced(message: Any) -> None:
            if message["type"] == "http.response.start" and self._body_open and scope is self.cycle.scope:
                await self._start_early(self.cycle, send, message)
            else:
                await send(message)

        scope["extensions"] = {WHOLE_BODY: {}} if scope is not self.cycle.scope or not self._body_open else {}
        await self._service(scope, receive, announced)

    async def _start_early(self, cycle: RequestResponseCycle, send: Any, message: Any) -> None:
        """An answer before its request has arrived. Its connection ends by the rest's timer: closed at once, with bytes
        on their way to it, the system would reset it, and the client lose the answer.
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
            self._close()  # the rest came while the answer was written
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
        """Called by uvicorn for whatever the parser refuses."""
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS:
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
        """A short answer, and the end."""
        if self.transport.is_closing() or self._discard_until is not None:
            return
        _CUT.labels(reason).inc()
        if self._body_open and self.cycle.response_started:
            self._close()  # the request that goes on arriving has its answer
            return
        title = HTTPStatus(status).phrase
        problem = {"type": "about:blank", "title": title, "status": status, "detail": _DETAILS[reason]}
        body = problem_body(problem, self.url.partition(b"?")[0].decode("latin-1"))
        head = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
        self.transport.write(STATUS_LINE[status] + head + body)
        if self.pipeline:  # an earlier request has not been answered yet
            self._close()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._end_by_discarding()

    def _end_by_discarding(self) -> None:
        """Ends the connection once the client has ended it, or has sent nothing for a while."""
        self._unset_keepalive_if_required()
        self._discard_until = self.loop.time() + self._limits.body_timeout_s
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._discard(0)

    def _discard(self, n: int) -> None:
        """Counts n bytes that have arrived, and waits for more."""
        self._discarded += n
        left_s = (self._discard_until or 0) - self.loop.time()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        if self._discarded > _DISCARDED_BYTES or left_s <= 0:
            self._close()
        else:
            self._rest_timer = self.loop.call_later(min(_REST_S, left_s), self._close)

    def _close(self) -> None:
        """What is written may still be read, in its time."""
        self.transport.close()
        self._expect_reader()

    def _cut(self, reason: str) -> None:
        _CUT.labels(reason).inc()
        self.transport.abort()
