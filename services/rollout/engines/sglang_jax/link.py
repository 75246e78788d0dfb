"""Messages between the service and the engine's process: msgpack frames over a socket pair. Nothing is unpickled.

The engine's process sends `beat` every second from a thread of its own, also while a step compiles for minutes. It is
silent only if the whole process is stopped or wedged. If a single step never ends, the beats go on; the engine's own
watchdog (`watchdog_timeout`, 900 s) then ends the service.

A frame is a 4-byte little-endian length and a msgpack map with a key `op`. The engine's side is synchronous. When the
service closes the link, `receive` and `send` raise ServiceGone and the engine ends, so it never outlives the service.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from shared import codec

BEAT_S = 1.0
_HEADER = struct.Struct("<I")
Message = dict[str, Any]


def frame(message: Message) -> bytes:
    body = codec.pack(message)
    return _HEADER.pack(len(body)) + body


def split(buffer: bytearray) -> list[Message]:
    """Remove all whole messages from `buffer` and return them."""
    messages: list[Message] = []
    at = 0
    while len(buffer) - at >= _HEADER.size:
        (size,) = _HEADER.unpack_from(buffer, at)
        start = at + _HEADER.size
        if len(buffer) - start < size:
            break
        messages.append(codec.unpack(bytes(buffer[start : start + size]), "engine message"))
        at = start + size
    del buffer[:at]
    return messages


def with_tuples(fields: Message) -> Message:
    """Turn the lists of a message into tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


class ServiceGone(EOFError):
    """The service has closed the link or died.

    If it died, the engine may see the broken socket before the signal that ends it.
    """


class EngineLink:
    """The engine's end of the link."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._wake_out, self._wake_in = os.pipe()

    def wake(self) -> None:
        """Make a waiting `receive` return; callable from any thread."""
        os.write(self._wake_in, b"!")

    def send(self, message: Message) -> None:
        """Blocks until the message is handed over; callable from any thread. Raises ServiceGone."""
        data = frame(message)
        with self._lock, _translate_closed():
            self._sock.sendall(data)

    def receive(self, wait_s: float) -> list[Message]:
        """All messages that have arrived; waits up to `wait_s` seconds for the first one. Raises ServiceGone."""
        while ready := select.select([self._sock, self._wake_out], [], [], wait_s)[0]:
            wait_s = 0.0
            if self._wake_out in ready:
                os.read(self._wake_out, 4096)
            if self._sock not in ready:
                continue
            with _translate_closed():
                data = self._sock.recv(1 << 20)
            if not data:
                raise ServiceGone("the service has closed the link")
            self._buffer += data
        return split(self._buffer)


@contextlib.contextmanager
def _translate_closed() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise ServiceGone(f"the service is gone: {error}") from error
