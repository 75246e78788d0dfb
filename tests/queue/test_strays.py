"""Entries that someone else put into the stream."""

import pytest
from redis.asyncio import Redis

from shared.queue.queue import Reservation, TicketQueue
from tests.support.redis import begun


@pytest.mark.parametrize(
    "fields",
    [
        {"foo": "bar"},
        {"t": "x", "d": "y"},
        {"t": "1"},
        {"t": "-5", "d": "z"},
        {"t": "1.5", "d": "z"},
        {"t": "9" * 5000, "d": "z"},
    ],
)
async def test_an_entry_that_no_producer_wrote_is_removed(redis: Redis, fields: dict[str, str]) -> None:
    queue = TicketQueue(redis, "r")
    epoch = await begun(queue, 0, 0, 0, 0, [], 0)
    await redis.xadd(queue.keys.stream, fields)
    reserved = await queue.reserve(60, 2, 1, 100)
    assert isinstance(reserved, Reservation)
    await queue.publish(reserved.ticket, b"payload")
    assert [entry.payload for entry in await queue.read(epoch, "c", 10, 100)] == [b"payload"]
    again = TicketQueue(redis, "r")
    epoch = await begun(again, 0, 0, 1, 0, [], epoch)
    assert [entry.ticket for entry in await again.read(epoch, "c", 10, 100)] == [reserved.ticket]
