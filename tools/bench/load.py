"""Generate load on an environment server.

Concurrent sessions send a step as soon as the last is answered. The client is cheap, so that it measures the server:
frames and requests are built in advance, and of answers only the end is parsed. Speaks WebSocket (RFC 6455) and
HTTP/1.1 with keep-alive connections.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

_TICKS = os.sysconf("SC_CLK_TCK")
_OPEN_AT_ONCE, _OPEN_S = 64, 120.0


@dataclass(slots=True)
class LoadResult:
    """Result of the measured time: latencies of all steps that ended in it, and the server's CPU seconds."""

    n_sessions: int
    seconds: float
    server_cpu_s: float
    latencies_s: list[float] = field(repr=False)

    @property
    def steps_per_s(self) -> float:
        return len(self.latencies_s) / self.seconds

    @property
    def cpu_s_per_1000(self) -> float:
        return 1000 * self.server_cpu_s / len(self.latencies_s)

    def quantile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Speaker(Protocol):
    """Requests of a protocol, and the framing of its answers."""

    def opening(self) -> Sequence[bytes]:
        """First messages, each sent when the one before is answered; the last starts the episode."""
        ...

    def step(self, number: int) -> bytes: ...

    def answered(self, received: bytearray) -> bytes | None:
        """Remove a complete answer from the front; None if there is none. Raises ValueError for an error answer."""
        ...


class LoadSession(asyncio.Protocol):
    """One connection. `ready` is done when its episode has started; `go` starts the steps."""

    def __init__(self, speaker: Speaker, record: Callable[[float, float], None]) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._speaker, self._record = speaker, record
        self._to_open = list(speaker.opening())
        self._received = bytearray()
        self._sent_at, self._n_steps, self._stopped = 0.0, 0, False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast("asyncio.Transport", transport)
        made.write(self._to_open.pop(0))

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while self._speaker.answered(self._received) is not None:
                self._on_answer()
        except ValueError as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            self.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(f"the server closed a connection: {exc}"))

    def go(self) -> None:
        self._n_steps += 1
        self._sent_at = time.perf_counter()
        if self._transport is not None and not self._stopped:
            self._transport.write(self._speaker.step(self._n_steps))

    def stop(self) -> None:
        self._stopped = True
        if self._transport is not None:
            self._transport.close()

    def _on_answer(self) -> None:
        if not self.ready.done():
            if self._to_open and self._transport is not None:
                self._transport.write(self._to_open.pop(0))
            else:
                self.ready.set_result(None)
        elif not self._stopped:
            now = time.perf_counter()
            self._record(self._sent_at, now)
            self.go()


async def load(
    port: int, pid: int, speak: Callable[[int], Speaker], n_sessions: int, seconds: float, warm_s: float
) -> LoadResult:
    """Open the sessions, let them step for `warm_s` seconds, then measure for `seconds`.

    Args:
        pid: process id of the server.
        speak: makes the speaker of a session from its number.
    """
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    since = float("inf")

    def record(sent_at: float, at: float) -> None:
        if at >= since:
            latencies.append(at - sent_at)

    slots, sessions = asyncio.Semaphore(_OPEN_AT_ONCE), []

    async def opened(number: int) -> LoadSession:
        async with slots:
            _, session = await loop.create_connection(lambda: LoadSession(speak(number), record), "127.0.0.1", port)
            await session.ready
            return session

    try:
        async with asyncio.timeout(_OPEN_S), asyncio.TaskGroup() as group:
            opening = [group.create_task(opened(number)) for number in range(n_sessions)]
        sessions = [task.result() for task in opening]
        for session in sessions:
            session.go()
        await asyncio.sleep(warm_s)
        cpu_s, since = cpu_seconds(pid), time.perf_counter()
        await asyncio.sleep(seconds)
        return LoadResult(n_sessions, time.perf_counter() - since, cpu_seconds(pid) - cpu_s, list(latencies))
    finally:
        for session in sessions:
            session.stop()


def cpu_seconds(pid: int) -> float:
    """CPU seconds of the process with all its threads (proc(5))."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / _TICKS


class FrameSpeaker:
    """Speaks WebSocket text frames: `reset`, then identical steps."""

    def __init__(self, path: str, reset: bytes, step: bytes) -> None:
        self._upgrade = (
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {'A' * 22}==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
        self._reset, self._step, self._upgraded = _frame(reset), _frame(step), False

    def opening(self) -> Sequence[bytes]:
        return self._upgrade, self._reset

    def step(self, number: int) -> bytes:
        return self._step

    def answered(self, received: bytearray) -> bytes | None:
        if not self._upgraded:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return None
            head = bytes(received[: end + 4])
            if b" 101 " not in head[:16]:
                raise ValueError(head.decode(errors="replace"))
            del received[: end + 4]
            self._upgraded = True
            return head
        while len(received) >= 2:
            size, start = received[1] & 0x7F, 2
            if size == 126:
                if len(received) < 4:
                    return None
                (size,), start = struct.unpack_from(">H", received, 2), 4
            if len(received) < start + size:
                return None
            kind, content = received[0] & 0x0F, bytes(received[start : start + size])
            del received[: start + size]
            if kind == 1:
                if content.startswith(b'{"type":"error"'):
                    raise ValueError(content.decode())
                return content
            if kind == 8:
                raise ValueError(f"the server closed the session: {content[2:].decode(errors='replace')}")
        return None


def _frame(content: bytes) -> bytes:
    """A masked text frame; a mask of zeros leaves the content as it is."""
    size = len(content)
    length = bytes([0x80 | size]) if size < 126 else bytes([0xFE]) + struct.pack(">H", size)
    return b"\x81" + length + bytes(4) + content


class RequestSpeaker:
    """Speaks HTTP/1.1 with keep-alive connections.

    Args:
        create: request that starts the episode.
        step: makes a step's request from the episode's id and the step's number.
    """

    def __init__(self, create: bytes, step: Callable[[bytes, int], bytes], read_id: Callable[[bytes], bytes]) -> None:
        self._create, self._make_step, self._read_id = create, step, read_id
        self._id: bytes | None = None

    def opening(self) -> Sequence[bytes]:
        return (self._create,)

    def step(self, number: int) -> bytes:
        assert self._id is not None
        return self._make_step(self._id, number)

    def answered(self, received: bytearray) -> bytes | None:
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(received[:end]).lower()
        at = head.index(b"content-length: ") + 16
        size = int(head[at:].partition(b"\r\n")[0])
        if len(received) < end + 4 + size:
            return None
        content = bytes(received[end + 4 : end + 4 + size])
        del received[: end + 4 + size]
        if not head.startswith(b"http/1.1 2"):
            raise ValueError(content.decode(errors="replace"))
        if self._id is None:
            self._id = self._read_id(content)
        return content
