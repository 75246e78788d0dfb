"""Partial loss of the queue's data is found by the next script, and the next trainer restores all of it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import pytest
from redis.asyncio import Redis

from shared.errors import Fenced, QueueUnavailable
from shared.queue.client import command
from shared.queue.queue import Finished, Published, Reservation, TicketQueue
from tests.support.redis import begun

BATCH, ETA, TOTAL = 2, 3, 100
FOUND_AT_ONCE = {"st", "q", "lease", "seen", "done"}
RUN = "run"


async def busy(redis: Redis) -> TicketQueue:
    """A queue with content in every key: ticket 1 is finished, 3 too, 2 and 4 are queued, 5 and 6 are leased."""
    await redis.flushall()
    queue = TicketQueue(redis, RUN)
    epoch = await begun(queue, 0, 0, 0, 0, (), 0)
    for _ in range(4):
        await reserved(queue)
    for ticket in (1, 3, 2, 4):
        assert await queue.publish(ticket, b"group") is Published.QUEUED
    entries = await queue.read(epoch, "trainer", 3, 0)
    await queue.dead_letter(epoch, entries[0], "to have one")
    await queue.commit(epoch, 1, [Finished(e.ticket, e.entry_id) for e in entries[:2]], 0)
    epoch = await begun(queue, 1, 0, 4, 0, (3,), epoch)  # from an older checkpoint
    await queue.read(epoch, "trainer", 1, 0)
    epoch = await begun(queue, 1, 0, 4, 0, (3,), epoch)  # a death without progress
    for _ in range(2):
        await reserved(queue)
    return queue


async def reserved(queue: TicketQueue) -> int:
    got = await queue.reserve(60.0, BATCH, ETA, TOTAL)
    assert isinstance(got, Reservation)
    return got.ticket


async def keys(redis: Redis) -> list[str]:
    return sorted(key.decode() for key in await command(redis, "KEYS", "*"))


async def tickets(queue: TicketQueue, redis: Redis) -> list[int]:
    """The unfinished ones that the queue knows of."""
    names = queue.keys
    found = [*await command(redis, "HKEYS", names.seen), *await command(redis, "ZRANGE", names.lease, 0, -1)]
    return sorted(map(int, found))


async def restored(queue: TicketQueue, redis: Redis) -> None:
    """Nothing but Fenced and QueueUnavailable comes of the loss; the next trainer finds or reissues every ticket."""
    for _ in range(2):
        with suppress(QueueUnavailable):
            await queue.state()
        await queue.renew(5, 60.0)
        with suppress(Fenced, QueueUnavailable):
            await queue.commit(3, 0, [], 0)
    await begun(queue, 1, 0, 6, 0, (3,), 3)
    state = await queue.state()
    assert (state.ready, state.low, state.done, state.issued) == (True, 1, 1, 6)
    assert await tickets(queue, redis) == [2, 4, 5, 6]
    epoch = state.epoch
    for ticket in (2, 4, 5, 6):
        await queue.publish(ticket, b"group")
    read = [e.ticket for _ in range(4) for e in await queue.read(epoch, "trainer", 4, 0)]
    assert sorted(read) == [2, 4, 5, 6]


async def test_every_key_and_every_pair_of_keys(redis: Redis):
    await busy(redis)
    names = await keys(redis)
    assert {name.rpartition(":")[2] for name in names} == FOUND_AT_ONCE | {"dead", "tries", "wake"}
    for lost in itertools.chain(itertools.combinations(names, 1), itertools.combinations(names, 2)):
        queue = await busy(redis)
        await command(redis, "DEL", *lost)
        await queue.renew(5, 60.0)
        is_open = await command(redis, "EXISTS", queue.keys.state)
        assert is_open != any(name.rpartition(":")[2] in FOUND_AT_ONCE for name in lost), lost
        await restored(queue, redis)


async def test_every_key_of_another_type(redis: Redis):
    await busy(redis)
    for name in await keys(redis):
        for other in (("SET", name, "x"), ("SADD", name, "x"), ("HSET", name, "a", "b")):
            queue = await busy(redis)
            await command(redis, "DEL", name)
            await command(redis, *other)
            await restored(queue, redis)


async def test_every_field_member_and_entry(redis: Redis):
    n = 0
    await busy(redis)
    for lost in [part async for part in parts(redis, await keys(redis))]:
        queue = await busy(redis)
        words = [await last_entry(redis, word[1:]) if word.startswith("^") else word for word in lost]
        words = [f"t{await fence(redis)}" if word == "group" else word for word in words]
        await command(redis, *words)
        await restored(queue, redis)
        n += 1
    assert n > 25


async def parts(redis: Redis, names: Iterable[str]) -> AsyncIterator[tuple[str, ...]]:
    """Commands that remove one part each; `^KEY` stands for the last entry of that stream."""
    for name in names:
        match (await command(redis, "TYPE", name)).decode():
            case "hash":
                for field in await command(redis, "HKEYS", name):
                    yield "HDEL", name, field.decode()
            case "zset":
                for member in await command(redis, "ZRANGE", name, 0, -1):
                    yield "ZREM", name, member.decode()
            case "set":
                for member in await command(redis, "SMEMBERS", name):
                    yield "SREM", name, member.decode()
            case _:
                yield "XTRIM", name, "MAXLEN", "0"
                yield "XDEL", name, f"^{name}"
                if await command(redis, "XINFO", "GROUPS", name):
                    yield "XGROUP", "DESTROY", name, "group"


async def last_entry(redis: Redis, name: str) -> str:
    return (await command(redis, "XREVRANGE", name, "+", "-", "COUNT", 1))[0][0].decode()


async def fence(redis: Redis) -> str:
    return (await command(redis, "HGET", TicketQueue(redis, RUN).keys.state, "fence")).decode()


@pytest.mark.parametrize("value", ["", "none", "nan ", "1-1"])
async def test_a_number_that_is_none(redis: Redis, value: str):
    for field in ("issued", "low", "version", "epoch", "clock", "wake"):
        queue = await busy(redis)
        await command(redis, "HSET", queue.keys.state, field, value)
        await restored(queue, redis)


async def test_a_loss_while_a_trainer_begins(redis: Redis):
    """Between `begin` and `open`, where sizes do not add up yet."""
    queue = await busy(redis)
    for name in [key for key in await keys(redis) if key.rpartition(":")[2] in FOUND_AT_ONCE]:
        queue = await busy(redis)
        epoch = await queue.begin(1, 0, 6, 0, (3,), 3)
        await command(redis, "DEL", name)
        with suppress(Fenced):
            await queue.open(epoch)
        await restored(queue, redis)
