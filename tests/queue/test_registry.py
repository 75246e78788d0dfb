"""Servers come, change, go, and die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from shared.engines import DeclaredEngine
from shared.process.ports import free_port
from shared.queue import registry
from shared.queue.client import connect
from shared.queue.registry import RegisteredServer, Registry

PLAIN = DeclaredEngine("plain", ("exact_ids", "spans"))
ONE = RegisteredServer(id="one", url="http://127.0.0.1:1", version="e000001-s000000", capacity=8, epoch=1)
TWO = RegisteredServer(id="two", url="http://127.0.0.1:2", version="e000001-s000000", capacity=8, epoch=1, engine=PLAIN)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(registry, "TTL_S", 0.2)


@asynccontextmanager
async def registered(servers: Registry, current: Callable[[], RegisteredServer | None]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        beating = group.create_task(servers.heartbeat(current))
        yield
        beating.cancel()


async def until(servers: Registry, expected: list[RegisteredServer]) -> None:
    async with asyncio.timeout(60):
        while await servers.servers() != expected:
            await asyncio.sleep(0.005)


async def test_servers_come_and_go(redis: Redis):
    servers = Registry(redis, "run")
    async with registered(servers, lambda: ONE):
        await until(servers, [ONE])
        async with registered(servers, lambda: TWO):
            await until(servers, [ONE, TWO])
        assert await servers.servers() == [ONE]
    assert await servers.servers() == []
    assert await redis.keys("*") == []


@pytest.mark.usefixtures("fast")
async def test_a_record_follows_its_server(redis: Redis):
    servers, now = Registry(redis, "run"), [ONE]
    newer = RegisteredServer(id="one", url=ONE.url, version="e000001-s000001", capacity=8, epoch=1)
    async with registered(servers, lambda: now[0] if now else None):
        await until(servers, [ONE])
        now[0] = newer
        await until(servers, [newer])
        now.clear()
        await until(servers, [])


async def test_a_server_is_registered_as_soon_as_it_may_get_work(redis: Redis, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "HEARTBEAT_S", 3600.0)
    servers, ready = Registry(redis, "run"), list[RegisteredServer]()
    looks = 0

    def current() -> RegisteredServer | None:
        nonlocal looks
        looks += 1
        return ready[0] if ready else None

    async with registered(servers, current):
        async with asyncio.timeout(60):
            while looks < 3:
                await asyncio.sleep(0.005)
        assert await servers.servers() == []
        ready.append(ONE)
        await until(servers, [ONE])


async def test_a_server_that_cannot_be_taken_off_now_does_not_try_without_pause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(registry, "_NOT_YET_S", 0.0)
    looks = 0

    def current() -> RegisteredServer | None:
        nonlocal looks
        looks += 1
        return ONE if looks == 1 else None

    began = time.monotonic()
    async with registered(Registry(connect(f"redis://127.0.0.1:{free_port()}"), "run"), current):
        while looks < 4:
            await asyncio.sleep(0.01)
        assert looks <= 1 + (time.monotonic() - began) / 0.2


async def test_a_dead_server_leaves_by_itself(redis: Redis):
    servers = Registry(redis, "run")
    await servers._register(ONE)
    assert await servers.servers() == [ONE]
    assert 0 < await redis.pttl("{run}:srv:one") <= registry.TTL_S * 1000
    await redis.pexpire("{run}:srv:one", 1)
    await until(servers, [])
    assert await redis.keys("*") == []


@pytest.mark.usefixtures("fast")
async def test_a_wiped_registry_fills_again(redis: Redis):
    servers = Registry(redis, "run")
    async with registered(servers, lambda: ONE):
        await until(servers, [ONE])
        await redis.flushall()
        await until(servers, [ONE])
