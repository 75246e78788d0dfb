"""A real server for tests: one process for the session, empty at the start of each test.

Import the fixtures in a `conftest.py`: `from tests.support.redis import redis, redis_server, redis_url  # noqa: F401`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from shared.queue.client import connect
from shared.queue.queue import TicketQueue
from shared.queue.server import ServerSpec
from tests.support.tokens import write_private
from tools.embedded_redis import embedded_server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSpec]:
    with embedded_server(tmp_path_factory.mktemp("redis")) as spec:
        yield spec


@pytest.fixture
async def redis(redis_server: ServerSpec) -> AsyncIterator[Redis]:
    """A client of the emptied server."""
    async with connect(redis_server.url) as client:
        await client.flushall()
        yield client


async def begun(
    queue: TicketQueue,
    low: int,
    version: int,
    issued: int,
    void: int,
    done: Iterable[int],
    epoch: int,
    above: int = 0,
) -> int:
    """A trainer has taken over and opened the queue; its epoch."""
    epoch = await queue.begin(low, version, issued, void, done, epoch, above)
    await queue.open(epoch)
    return epoch


def configured(url: str, folder: Path) -> dict[str, str]:
    """The keys of the section `services` for that address: the password in a file of its own."""
    parts = urlsplit(url)
    folder.mkdir(parents=True, exist_ok=True)
    password_file = write_private(folder / "redis_password", parts.password or "")
    return {"redis_url": f"redis://{parts.hostname}:{parts.port}/0", "redis_password_file": str(password_file)}


@pytest.fixture
async def redis_url(redis: Redis, redis_server: ServerSpec) -> str:
    """The address of the emptied server, password included."""
    return redis_server.url
