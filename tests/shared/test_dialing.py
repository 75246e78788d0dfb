"""Hosts with a dead address before a live one: the live one is reached, by every client that dials for itself."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from shared.clients.dialing import open_socket
from shared.queue.client import connect
from volley_sandbox.backends.remote import address

HOST = "two-addresses.test"
DEADLINE_S = 2.5
"""Below the three seconds after which Redis' connections are given up."""


@contextmanager
def silent_address() -> Iterator[int]:
    """A port at ::1 that answers nothing: the queue of a listener is full."""
    with socket.socket(socket.AF_INET6) as listener:
        try:
            listener.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 on its loopback interface")
        listener.listen(0)
        waiting = [socket.socket(socket.AF_INET6) for _ in range(4)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(listener.getsockname())
            yield listener.getsockname()[1]
        finally:
            for one in waiting:
                one.close()


@asynccontextmanager
async def dead_then_live(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A port that is silent at ::1 and gives `answer` to every Redis command at 127.0.0.1; HOST has both addresses."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(answer * data.count(b"*"))
        writer.close()

    with silent_address() as port:
        known = [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]

        async def look_up(host: str, *_: object, **__: object) -> object:
            assert host == HOST
            return known

        async with await asyncio.start_server(serve, "127.0.0.1", port):
            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
            yield port


async def test_a_dead_address_does_not_hide_a_live_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with dead_then_live(b"", monkeypatch) as port:
        with await open_socket(HOST, port, DEADLINE_S) as made:
            assert made.getpeername() == ("127.0.0.1", port)


async def test_remote_environments_are_reached_past_a_dead_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async with dead_then_live(b"", monkeypatch) as port:
        with await address.connect(address.read_address(f"http://{HOST}:{port}"), DEADLINE_S) as made:
            assert made.getpeername() == ("127.0.0.1", port)


async def test_redis_is_reached_past_a_dead_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async with dead_then_live(b"+PONG\r\n", monkeypatch) as port, connect(f"redis://{HOST}:{port}/0") as client:
        async with asyncio.timeout(DEADLINE_S):
            assert await client.ping()


async def test_a_host_without_a_live_address_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await open_socket("127.0.0.1", unused.getsockname()[1], DEADLINE_S)
