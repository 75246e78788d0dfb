"""Foreign errors become the project's own, and no command is repeated behind the caller's back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest
import uvloop
from redis.asyncio import Redis

from shared.errors import ConfigError, Fenced, QueueUnavailable
from shared.queue.client import command, connect, transaction
from shared.queue.queue import TicketQueue
from shared.queue.server import ServerSpec
from tests.support.redis import begun
from tests.support.tokens import write_private


async def test_an_unreachable_server_is_named_as_such():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with connect(f"redis://127.0.0.1:{taken.getsockname()[1]}") as redis:
            with pytest.raises(QueueUnavailable, match="did not answer"):
                await TicketQueue(redis, "run").state()


async def test_a_broken_connection_is_not_retried():
    connections = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, connect(f"redis://127.0.0.1:{port}") as redis:
        with pytest.raises(QueueUnavailable):
            await command(redis, "PING")
    assert connections == 1


@pytest.mark.parametrize("url", ["http://host", "redis://host:port"])
def test_a_malformed_url_is_a_configuration_error(url: str):
    with pytest.raises(ConfigError, match="malformed"):
        connect(url)


def test_a_missing_password_file_is_a_configuration_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="absent"):
        connect("redis://host", tmp_path / "absent")


async def test_a_missing_group_means_fenced(redis: Redis):
    with pytest.raises(Fenced):
        await command(redis, "XREADGROUP", "GROUP", "g", "c", "STREAMS", "nothing", ">")


async def test_a_full_server_loses_nothing(redis: Redis):
    """Publishing fails as a whole; the ticket stays leased, and the group is queued once there is memory again."""
    queue = TicketQueue(redis, "run")
    await begun(queue, low=0, version=0, issued=0, void=0, done=(), epoch=0)
    await queue.reserve(60, 1, 0, 1)
    await command(redis, "CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(QueueUnavailable, match="memory"):
            await queue.publish(1, b"group")
    finally:
        await command(redis, "CONFIG", "SET", "maxmemory", 0)
    assert ((await queue.state()).depth, (await queue.state()).leased) == (0, 1)
    assert await queue.publish(1, b"group") == "queued"


async def test_a_server_that_takes_no_writes_now_is_unavailable_in_a_transaction_too(redis: Redis):
    await command(redis, "CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        for write in (command(redis, "SET", "a", "1"), transaction(redis, ("SET", "a", "1"), ("SET", "b", "2"))):
            with pytest.raises(QueueUnavailable, match="cannot run this command now: NOREPLICAS"):
                await write
    finally:
        await command(redis, "CONFIG", "SET", "min-replicas-to-write", 0)


@pytest.mark.parametrize("send", [lambda redis: command(redis, "PING"), lambda redis: transaction(redis, ("PING",))])
def test_a_connection_that_was_reset_under_uvloop_is_one_failure_and_is_replaced(
    redis_url: str, send: Callable[[Redis], Awaitable[object]]
):
    async def reset() -> None:
        async with connect(redis_url) as redis:
            await command(redis, "PING")
            (connection,) = redis.connection_pool._available_connections
            sent = connection._send_packed_command

            async def reset_first(packed: Iterable[bytes]) -> None:
                connection._writer.transport.abort()
                await asyncio.sleep(0.01)
                await sent(packed)

            connection._send_packed_command = reset_first
            with pytest.raises(QueueUnavailable, match="the handler is closed"):
                await send(redis)
            del connection._send_packed_command
            assert not connection.is_connected
            await send(redis)
            assert redis.connection_pool._available_connections == [connection]

    uvloop.run(reset())


ERRORS = {
    "LOADING Redis is loading the dataset in memory": QueueUnavailable,
    "READONLY You can't write against a read only replica.": QueueUnavailable,
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": QueueUnavailable,
    "OOM command not allowed when used memory > 'maxmemory'.": QueueUnavailable,
    "MISCONF Errors writing to the AOF file": QueueUnavailable,
    "NOREPLICAS Not enough good replicas to write.": QueueUnavailable,
    "BUSY Redis is busy running a script.": QueueUnavailable,
    "CLUSTERDOWN The cluster is down": QueueUnavailable,
    "TRYAGAIN Multiple keys request during rehashing of slot": QueueUnavailable,
    "ERR max number of clients reached": QueueUnavailable,
    "WRONGTYPE Operation against a key holding the wrong kind of value": QueueUnavailable,
    "NOAUTH Authentication required.": ConfigError,
    "WRONGPASS invalid username-password pair or user is disabled.": ConfigError,
    "NOPERM User default has no permissions to run the 'ping' command": ConfigError,
    "DENIED Redis is running in protected mode": ConfigError,
}


@pytest.mark.parametrize("answer", ERRORS, ids=lambda answer: answer.partition(" ")[0])
@pytest.mark.parametrize("url", ["redis://127.0.0.1", "redis://:word@127.0.0.1"])
async def test_a_refusal_of_the_server_is_named(answer: str, url: str):
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while commands := await reader.read(4096):
            writer.write(f"-{answer}\r\n".encode() * (commands.count(b"\r\n*") + 1))
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        async with connect(f"{url}:{port}") as redis:
            for send in (
                lambda: command(redis, "PING"),
                lambda: transaction(redis, ("PING",)),
                lambda: TicketQueue(redis, "r").renew(1, 1),
            ):
                with pytest.raises(ERRORS[answer], match=answer.split()[-1].strip(".")):
                    await send()
        async with connect(f"{url}:{port}", refused_s=60.0) as redis:
            expected = ConfigError if answer.startswith("DENIED") else QueueUnavailable
            with pytest.raises(expected, match=answer.split()[-1].strip(".")):
                await command(redis, "PING")


async def test_a_password_may_change(redis: Redis, redis_server: ServerSpec, tmp_path: Path):
    """The server has the new one first, then the file; a connection that was made before stays in use."""
    file = write_private(tmp_path / "password", redis_server.password)
    url = f"redis://127.0.0.1:{redis_server.port}"
    try:
        async with connect(url, file, refused_s=60.0) as patient, connect(url, file) as impatient:
            await command(patient, "PING")
            await command(redis, "CONFIG", "SET", "requirepass", "another")
            await command(patient, "PING")
            await patient.connection_pool.disconnect()
            with pytest.raises(QueueUnavailable, match="refuses this client"):
                await command(patient, "PING")
            with pytest.raises(ConfigError, match="refuses this client"):
                await command(impatient, "PING")
            file.unlink()
            with pytest.raises(QueueUnavailable, match="refuses this client"):
                await command(patient, "PING")
            write_private(file, "another")
            await command(patient, "PING")
    finally:
        await command(redis, "CONFIG", "SET", "requirepass", redis_server.password)


async def test_a_refused_password_is_waited_for_within_bounds(redis: Redis, redis_server: ServerSpec):
    async with connect(f"redis://:wrong@127.0.0.1:{redis_server.port}", refused_s=0.05) as client:
        with pytest.raises(QueueUnavailable):
            await command(client, "PING")
        await asyncio.sleep(0.06)
        with pytest.raises(ConfigError):
            await command(client, "PING")
