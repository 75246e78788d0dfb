"""TCP proxy between services that can delay, stall and cut connections.

Invariants: bytes arrive in order and unchanged or not at all; a target that cannot be reached resets the caller's
connection, as a dead service would; leaving the context cuts every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

_CHUNK = 65536
_RESET = struct.pack("ii", 1, 0)  # linger 0: closing sends RST


class Proxy:
    """One link from `port` to `target` (host, port).

    `delay_s`: delay of each chunk. `n_connections`: connections that reached the target. `n_bytes`: bytes passed in
    both directions.
    """

    def __init__(self) -> None:
        self.port = 0
        self.target: tuple[str, int] | None = None
        self.delay_s = 0.0
        self.n_connections = self.n_bytes = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()

    @classmethod
    @asynccontextmanager
    async def listening(cls) -> AsyncIterator[Self]:
        proxy = cls()
        server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            server.close()
            proxy.resume()
            proxy.cut()

    def stall(self) -> None:
        """Stop traffic in both directions; connections stay open."""
        self._flowing.clear()

    def resume(self) -> None:
        """Let traffic pass again, without delay."""
        self.delay_s = 0.0
        self._flowing.set()

    def cut(self) -> int:
        """Reset every connection, and return their number; new ones may be made."""
        n = len(self._writers) // 2
        for writer in list(self._writers):
            _reset(writer)
        return n

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.target is not None
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            _reset(writer)
            return
        self.n_connections += 1
        both = {writer, far_writer}
        self._writers |= both
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer))
                group.create_task(self._pump(far_reader, writer))
        finally:
            self._writers -= both
            for one in both:
                one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy one direction until its end; pass on an end as an end, a reset as a reset."""
        try:
            while data := await reader.read(_CHUNK):
                await self._flowing.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                self.n_bytes += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            _reset(writer)
        else:
            with contextlib.suppress(OSError):
                writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    raw: socket.socket | None = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
