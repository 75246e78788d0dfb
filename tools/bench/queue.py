"""Compare the ticket queue with a raw Redis client, with the same payloads and server.

Both sides use the same client library: a few connections publish groups one by one while one reader takes them in
batches and commits each batch. The raw side is XADD, XREADGROUP, XACK with XDEL: no tickets, fence or deduplication.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from redis.asyncio import Redis

from shared.queue.client import command, connect, transaction
from shared.queue.queue import Finished, Published, Reservation, TicketQueue
from tools.bench.result import BenchResult, emit
from tools.embedded_redis import embedded_server

_PUBLISHERS, _BATCH, _ROUNDS = 8, 32, 10
_LARGE, _SMALL = 300_000, 300  # bytes of payload
_COUNTS = {_LARGE: 128, _SMALL: 2048}  # groups a round


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, embedded_server(Path(folder)) as server:
        emit(asyncio.run(_measure(server.url)))


async def _measure(url: str) -> dict[str, BenchResult]:
    async with connect(url) as redis:
        large, raw_large = await _best(redis, _LARGE)
        small, raw_small = await _best(redis, _SMALL)
    megabytes = _LARGE / 1e6
    return {
        "queue_large_groups": BenchResult(large, "groups/s", raw_large),
        "queue_large_bytes": BenchResult(large * megabytes, "MB/s", raw_large * megabytes),
        "queue_small_groups": BenchResult(small, "groups/s", raw_small),
    }


async def _best(redis: Redis, size: int) -> tuple[float, float]:
    """(queue, raw) in groups/s: the best of several alternating rounds, because noise only slows down."""
    payload, count = os.urandom(size), _COUNTS[size]
    ours, raw = 0.0, 0.0
    for _ in range(_ROUNDS):
        raw = max(raw, await _raw_round(redis, payload, count))
        ours = max(ours, await _queue_round(redis, payload, count))
    return ours, raw


async def _queue_round(redis: Redis, payload: bytes, count: int) -> float:
    await command(redis, "FLUSHALL")
    queue = TicketQueue(redis, "bench")
    epoch = await queue.begin(low=0, version=0, issued=0, void=0, done=(), epoch=0)
    await queue.open(epoch)

    for _ in range(count):
        assert isinstance(await queue.reserve(ttl_s=60.0, batch=count, max_staleness=0, total=count), Reservation)

    async def publish(number: int) -> None:
        assert await queue.publish(1 + number, payload) is Published.QUEUED

    async def take(version: int) -> int:
        entries = await queue.read(epoch, "trainer", _BATCH, block_ms=1000)
        await queue.commit(epoch, version, [Finished(entry.ticket, entry.entry_id) for entry in entries], void=0)
        return len(entries)

    return await _groups_per_s(publish, take, count)


async def _raw_round(redis: Redis, payload: bytes, count: int) -> float:
    await command(redis, "FLUSHALL")
    await command(redis, "XGROUP", "CREATE", "raw", "readers", "0", "MKSTREAM")

    async def publish(_: int) -> None:
        await command(redis, "XADD", "raw", "*", "d", payload)

    async def take(_: int) -> int:
        where = ("COUNT", _BATCH, "BLOCK", 1000, "STREAMS", "raw", ">")
        answer = await command(redis, "XREADGROUP", "GROUP", "readers", "reader", *where)
        ids = [entry_id for entry_id, _ in answer[0][1]] if answer else []
        if ids:
            await transaction(redis, ("XACK", "raw", "readers", *ids), ("XDEL", "raw", *ids))
        return len(ids)

    return await _groups_per_s(publish, take, count)


async def _groups_per_s(
    publish: Callable[[int], Awaitable[None]], take: Callable[[int], Awaitable[int]], count: int
) -> float:
    """Publish `count` groups, several at a time, while one reader takes them."""
    numbers = iter(range(count))

    async def publisher() -> None:
        for number in numbers:
            await publish(number)

    async def reader() -> None:
        taken, versions = 0, itertools.count(1)
        while taken < count:
            taken += await take(next(versions))

    started = time.perf_counter()
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        group.create_task(reader())
        for _ in range(_PUBLISHERS):
            group.create_task(publisher())
    return count / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
