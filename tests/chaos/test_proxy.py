"""The links: bytes pass unchanged until they are told not to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.process.ports import free_port
from tools.chaos.proxy import Proxy

type Link = tuple[Proxy, asyncio.StreamReader, asyncio.StreamWriter]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(4096):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def linked() -> AsyncIterator[Link]:
    """A proxy in front of an echo, and a connection through it."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with server, Proxy.listening() as proxy:
        proxy.target = server.sockets[0].getsockname()[:2]
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        try:
            yield proxy, reader, writer
        finally:
            writer.close()


async def test_bytes_pass_in_order():
    async with linked() as (_, reader, writer):
        data = bytes(range(256)) * 2000
        writer.write(data)
        assert await reader.readexactly(len(data)) == data


async def test_what_passes_is_counted():
    async with linked() as (proxy, reader, writer):
        writer.write(b"ten bytes!")
        await reader.readexactly(10)
        assert (proxy.n_connections, proxy.n_bytes) == (1, 20)


async def test_a_delayed_link_loses_nothing():
    async with linked() as (proxy, reader, writer):
        proxy.delay_s = 0.01
        writer.write(b"slowly")
        assert await reader.readexactly(6) == b"slowly"


async def test_a_stalled_link_passes_nothing_until_it_goes_on():
    async with linked() as (proxy, reader, writer):
        proxy.stall()
        writer.write(b"held")
        waiting = asyncio.ensure_future(reader.readexactly(4))
        assert not (await asyncio.wait({waiting}, timeout=0.1))[0]
        proxy.resume()
        assert await waiting == b"held"


async def test_a_cut_is_a_reset_and_new_connections_work():
    async with linked() as (proxy, reader, writer):
        writer.write(b"x")
        await reader.readexactly(1)
        assert proxy.cut() == 1
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        again, other = await asyncio.open_connection("127.0.0.1", proxy.port)
        other.write(b"y")
        assert await again.readexactly(1) == b"y"
        other.close()


async def test_a_dead_target_resets_the_caller():
    async with Proxy.listening() as proxy:
        proxy.target = "127.0.0.1", free_port()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()


async def test_what_the_target_closes_is_closed():
    async with linked() as (_, reader, writer):
        writer.write(b"last")
        writer.write_eof()
        assert await reader.read() == b"last"
