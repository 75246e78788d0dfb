"""The queue in memory answers as the one on Redis does, for any order of work, and wakes those who wait."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from examples.in_memory_queue import InMemoryQueue
from shared.errors import Fenced
from shared.queue.client import command, connect
from shared.queue.queue import TicketQueue
from shared.queue.records import Finished, Published, PublishRefusal, Reservation
from shared.queue.server import ServerSpec
from shared.run.progress import TicketProgress
from tests.support.redis import begun

BATCH, ETA, TOTAL = 2, 1, 12
TICKETS = st.integers(0, 9)
ACTIONS = st.one_of(
    st.tuples(st.just("reserve"), st.sampled_from((600.0, 0.0)), st.sampled_from((None, 3))),
    st.tuples(st.just("reserve"), st.just(600.0), st.none()),
    st.tuples(st.just("publish"), TICKETS),
    st.tuples(st.just("publish"), TICKETS),
    st.tuples(st.just("renew"), TICKETS, st.sampled_from((600.0, 0.0))),
    st.tuples(st.just("read"), st.integers(1, 3)),
    st.tuples(st.just("commit"), st.booleans()),
    st.tuples(st.just("commit"), st.just(False)),
    st.tuples(st.just("take_over")),
)


class Both:
    """One queue with its trainer; both kinds get the same actions."""

    def __init__(self, queue: TicketQueue | InMemoryQueue, another: Any) -> None:
        self.queue, self.another = queue, another
        self.epoch = self.version = 0
        self.progress = TicketProgress()
        self.hand: list[Finished] = []
        self.stale: list[tuple[Any, int]] = []

    async def begin(self) -> int:
        at = self.progress
        issued = (await self.queue.state()).issued
        self.hand = []
        self.epoch = await begun(self.queue, at.low, self.version, issued, at.void, at.done, self.epoch)
        return self.epoch

    async def reserve(self, ttl_s: float, ahead: int | None) -> Reservation | PublishRefusal:
        return await self.queue.reserve(ttl_s, BATCH, ETA, TOTAL, ahead)

    async def publish(self, ticket: int) -> Published:
        return await self.queue.publish(ticket, b"%d" % ticket)

    async def renew(self, ticket: int, ttl_s: float) -> bool:
        return await self.queue.renew(ticket, ttl_s)

    async def read(self, count: int) -> list[tuple[int, bytes]]:
        entries = await self.queue.read(self.epoch, "trainer", count, 0)
        self.hand += [Finished(entry.ticket, entry.entry_id) for entry in entries]
        return [(entry.ticket, entry.payload) for entry in entries]

    async def commit(self, void: bool) -> None:
        """A step of the groups in hand, or their end without one."""
        for one in self.hand:
            self.progress.finish(one.ticket, void=void)
        self.version += bool(self.hand) and not void
        await self.queue.commit(self.epoch, self.version, self.hand, self.progress.void)
        self.hand = []

    async def take_over(self) -> int:
        before, old = self.queue, self.epoch
        self.queue = self.another(before)
        epoch = await self.begin()
        with pytest.raises(Fenced):
            await before.commit(old, self.version, [], 0)
        return epoch


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, min_size=10, max_size=40))
def test_both_queues_give_the_same_answers(redis_server: ServerSpec, actions: list[tuple[Any, ...]]) -> None:
    async def compare() -> None:
        redis: Redis = connect(redis_server.url)
        try:
            await command(redis, "FLUSHALL")
            both = (
                Both(TicketQueue(redis, "run"), lambda _: TicketQueue(redis, "run")),
                Both(InMemoryQueue(), lambda one: one),
            )
            assert await both[0].publish(1) == await both[1].publish(1) == Published.NOT_READY
            assert await both[0].begin() == await both[1].begin()
            for name, *arguments in actions:
                first, second = [await getattr(one, name)(*arguments) for one in both]
                assert first == second, name
                states = [await one.queue.state() for one in both]
                assert dataclasses.asdict(states[0]) == dataclasses.asdict(states[1]), name
        finally:
            await redis.aclose()

    asyncio.run(compare())


async def test_a_commit_wakes_a_producer_and_a_group_the_trainer() -> None:
    queue = InMemoryQueue()
    await begun(queue, 0, 0, 0, 0, (), 0)
    reading = asyncio.create_task(queue.read(1, "trainer", 8, 10_000))
    for ticket in range(1, 5):
        assert await queue.reserve_wait(600.0, BATCH, ETA, TOTAL, 10.0) == Reservation(ticket, 0)
    waiting = asyncio.create_task(queue.reserve_wait(600.0, BATCH, ETA, TOTAL, 10.0))
    await queue.publish(1, b"1")
    (entry,) = await asyncio.wait_for(reading, 5)
    await queue.commit(1, 1, [Finished(1, entry.entry_id)], 0)
    assert await asyncio.wait_for(waiting, 5) == Reservation(5, 1)


async def test_who_waits_in_vain_gets_the_reason_and_a_lease_ends_by_itself() -> None:
    queue = InMemoryQueue()
    assert await queue.reserve_wait(600.0, BATCH, ETA, TOTAL, 0.01) is PublishRefusal.NOT_READY
    await begun(queue, 0, 0, 0, 0, (), 0)
    assert await queue.read(1, "trainer", 1, 10) == []
    first = await queue.reserve(0.05, BATCH, 0, 1)
    assert await queue.reserve(600.0, BATCH, 0, 1) is PublishRefusal.EXHAUSTED
    assert await queue.reserve_wait(600.0, BATCH, 0, 1, 10.0) == first
