"""Leases go by the queue's own clock, whatever the server's wall clock does."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from shared.queue.client import command
from shared.queue.queue import PublishRefusal, Reservation, TicketQueue
from shared.queue.registry import TTL_S, RegisteredServer, Registry
from tests.support.redis import begun

HOUR_MS = 3_600_000
TTL_S_OF_LEASE = 600.0


async def jump(redis: Redis, queue: TicketQueue, ms: int) -> None:
    """The server's clock jumps: what the queue read last is as far away in the other direction."""
    await command(redis, "HINCRBY", queue.keys.state, "wall", -ms)


async def opened(redis: Redis) -> TicketQueue:
    queue = TicketQueue(redis, "run")
    await begun(queue, 0, 0, 0, 0, (), 0)
    return queue


async def reserve(queue: TicketQueue, ttl_s: float = TTL_S_OF_LEASE) -> int | PublishRefusal:
    got = await queue.reserve(ttl_s, 1, 0, 1)
    return got.ticket if isinstance(got, Reservation) else got


async def left_ms(redis: Redis, queue: TicketQueue) -> float:
    deadline = float(await command(redis, "ZSCORE", queue.keys.lease, 1))
    return deadline - float(await command(redis, "HGET", queue.keys.state, "clock"))


@pytest.mark.parametrize("ms", [-HOUR_MS, HOUR_MS])
async def test_a_jump_takes_at_most_half_a_lease(redis: Redis, ms: int):
    queue = await opened(redis)
    assert await reserve(queue) == 1
    await jump(redis, queue, ms)
    assert await reserve(queue) is PublishRefusal.EXHAUSTED
    left = await left_ms(redis, queue)
    assert TTL_S_OF_LEASE * 500 - 60_000 < left <= TTL_S_OF_LEASE * (500 if ms > 0 else 1000)
    assert await queue.renew(1, TTL_S_OF_LEASE)
    assert await left_ms(redis, queue) == TTL_S_OF_LEASE * 1000


async def test_a_lease_ends_in_its_time_after_the_clock_has_gone_back(redis: Redis):
    queue = await opened(redis)
    assert await reserve(queue, 0.2) == 1
    await jump(redis, queue, -HOUR_MS)
    got = await queue.reserve_wait(0.2, 1, 0, 1, deadline_s=20.0)
    assert isinstance(got, Reservation)
    assert got.ticket == 1


async def test_a_clock_before_2001_takes_no_lease_for_the_pool(redis: Redis):
    queue = await opened(redis)
    await command(redis, "HSET", queue.keys.state, "clock", 0)
    assert await reserve(queue) == 1
    assert await reserve(queue) is PublishRefusal.EXHAUSTED


async def test_a_dead_server_leaves_in_its_time_after_the_clock_has_gone_back(redis: Redis):
    """Redis keeps a key by its wall clock: for as long as that went back."""
    registry = Registry(redis, "run")
    await registry._register(RegisteredServer("a", "http://a", "e000001-s000001", 1, 1))
    await command(redis, "PEXPIRE", "{run}:srv:a", HOUR_MS)
    assert [server.id for server in await registry.servers()] == ["a"]
    assert await command(redis, "PTTL", "{run}:srv:a") <= TTL_S * 1000


@pytest.mark.parametrize("key", ["{run}:srv", "{run}:srv:a"])
async def test_a_record_of_another_type_is_replaced(redis: Redis, key: str):
    registry, server = Registry(redis, "run"), RegisteredServer("a", "http://a", "e000001-s000001", 1, 1)
    await command(redis, "HSET", key, "a", "b")
    assert await registry.servers() == []
    await registry._register(server)
    assert await registry.servers() == [server]
