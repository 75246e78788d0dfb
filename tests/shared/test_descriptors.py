"""A process without a file descriptor says so, and does not ask whether the others are running."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from shared.clients.base import HttpClient
from shared.errors import QueueUnavailable, ServiceUnreachable
from shared.queue.client import command, connect


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []
    try:
        held.append(socket.socket())
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0].fileno() + 8, hard))
        with suppress(OSError):
            while True:
                held.append(socket.socket())
        yield
    finally:
        for one in held:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_call_without_a_descriptor_names_the_limit() -> None:
    async with HttpClient("http://127.0.0.1:9") as client:
        with (
            no_descriptor_left(),
            pytest.raises(ServiceUnreachable, match=r"used all of its \d+ file descriptors.*ulimit -n"),
        ):
            await client.get("/health", attempts=1)
        with pytest.raises(ServiceUnreachable, match="is the service running"):
            await client.get("/health", attempts=1)


async def test_a_command_without_a_descriptor_names_the_limit() -> None:
    redis = connect("redis://127.0.0.1:9/0")
    with (
        no_descriptor_left(),
        pytest.raises(QueueUnavailable, match=r"used all of its \d+ file descriptors.*ulimit -n"),
    ):
        await command(redis, "PING")
    with pytest.raises(QueueUnavailable, match="is the server running"):
        await command(redis, "PING")
