"""The queue's operations one by one, against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.errors import ConfigError, Fenced, QueueUnavailable
from shared.queue.client import command, connect
from shared.queue.queue import Finished, Published, PublishRefusal, Reservation, StreamEntry, TicketQueue
from shared.queue.scripts import Scripts
from tests.support.redis import begun

BATCH, ETA, TOTAL = 2, 1, 100_000
CAP = (ETA + 1) * BATCH


@pytest.fixture
def queue(redis: Redis) -> TicketQueue:
    return TicketQueue(redis, "run")


async def start(queue: TicketQueue) -> int:
    return await begun(queue, low=0, version=0, issued=0, void=0, done=(), epoch=0)


async def take(queue: TicketQueue, ttl_s: float = 600.0, total: int = TOTAL) -> Reservation | PublishRefusal:
    return await queue.reserve(ttl_s, BATCH, ETA, total)


async def fill(queue: TicketQueue, *tickets: int) -> None:
    """Reserves up to the highest of `tickets` and publishes these."""
    for _ in range(max(tickets) - (await queue.state()).issued):
        assert isinstance(await take(queue), Reservation)
    for ticket in tickets:
        assert await queue.publish(ticket, b"group %d" % ticket) is Published.QUEUED


async def read(queue: TicketQueue, epoch: int, count: int = 10) -> list[StreamEntry]:
    return await queue.read(epoch, "trainer", count, 0)


async def snapshot(redis: Redis) -> dict[Any, Any]:
    return {key: await redis.dump(key) for key in await redis.keys("*")}


async def restore(redis: Redis, saved: dict[Any, Any]) -> None:
    await redis.flushall()
    for key, dump in saved.items():
        await redis.restore(key, 0, dump, replace=True)


async def test_nothing_is_issued_before_a_trainer_begins(queue: TicketQueue):
    assert await take(queue) is PublishRefusal.NOT_READY
    assert await queue.publish(1, b"") is Published.NOT_READY
    assert not (await queue.state()).ready


async def test_a_group_travels_once(queue: TicketQueue):
    epoch = await start(queue)
    assert await take(queue) == Reservation(ticket=1, version=0)
    assert await queue.publish(1, b"group") is Published.QUEUED
    [entry] = await read(queue, epoch)
    assert (entry.ticket, entry.payload, entry.deliveries) == (1, b"group", 1)
    await queue.commit(epoch, 1, [Finished(1, entry.entry_id)], 0)
    state = await queue.state()
    assert (state.low, state.version, state.depth, state.leased, state.done) == (1, 1, 0, 0, 0)
    assert await read(queue, epoch) == []


async def test_tickets_are_bounded_by_staleness_and_opened_by_commits(queue: TicketQueue):
    epoch = await start(queue)
    await fill(queue, 1, 2)
    assert [await take(queue) for _ in range(3)] == [Reservation(3, 0), Reservation(4, 0), PublishRefusal.FULL]
    await queue.commit(epoch, 1, [Finished(1), Finished(2)], 0)
    assert [await take(queue) for _ in range(3)] == [Reservation(5, 1), Reservation(6, 1), PublishRefusal.FULL]


async def test_a_void_ticket_is_replaced(queue: TicketQueue):
    epoch = await start(queue)
    assert [await take(queue, total=2) for _ in range(3)] == [
        Reservation(1, 0),
        Reservation(2, 0),
        PublishRefusal.EXHAUSTED,
    ]
    await queue.commit(epoch, 0, [Finished(2)], 1)
    assert await take(queue, total=2) == Reservation(3, 0)
    assert await take(queue, total=2) is PublishRefusal.EXHAUSTED


async def test_publishing_again_changes_nothing(queue: TicketQueue):
    epoch = await start(queue)
    await fill(queue, 1)
    assert await queue.publish(1, b"other") is Published.DUPLICATE
    await queue.commit(epoch, 0, [Finished(1)], 1)
    assert await queue.publish(1, b"other") is Published.DONE
    assert await queue.publish(9, b"") is Published.UNKNOWN
    assert await queue.publish(0, b"") is Published.UNKNOWN
    state = await queue.state()
    assert (state.depth, state.duplicates, state.strays) == (0, 2, 1)


async def test_a_late_lease_is_issued_again_before_new_tickets(queue: TicketQueue):
    await start(queue)
    for ttl_s in (600.0, 0.0, 0.0):
        await take(queue, ttl_s)
    assert await take(queue) == Reservation(2, 0)  # reserving 3 has already handed 2 out again
    assert await take(queue) == Reservation(3, 0)
    assert (await queue.state()).reissued == 2


async def test_renewing_keeps_a_lease_and_zero_gives_it_back(queue: TicketQueue):
    await start(queue)
    await take(queue, 0.0)
    assert await queue.renew(1, 600.0)
    assert await take(queue) == Reservation(2, 0)
    assert await queue.renew(1, 0.0)
    assert await take(queue) == Reservation(1, 0)
    await queue.publish(1, b"")
    assert not await queue.renew(1, 600.0)


async def test_a_new_trainer_gets_all_that_is_not_committed(queue: TicketQueue, redis: Redis):
    first = await start(queue)
    await fill(queue, 1, 2, 3)
    await read(queue, first)
    await queue.commit(first, 1, [Finished(1), Finished(2)], 0)
    successor = TicketQueue(redis, "run")
    second = await begun(successor, low=2, version=1, issued=3, void=0, done=(), epoch=first)
    assert second == first + 1
    assert [entry.ticket for entry in await read(successor, second)] == [3]


async def test_a_replaced_trainer_is_fenced(queue: TicketQueue, redis: Redis):
    old = await start(queue)
    await fill(queue, 1)
    [entry] = await read(queue, old)
    await begun(TicketQueue(redis, "run"), low=0, version=0, issued=1, void=0, done=(), epoch=old)
    for call in (
        queue.commit(old, 1, [Finished(1, entry.entry_id)], 0),
        queue.read(old, "trainer", 1, 0),
        queue.dead_letter(old, entry, "poison"),
    ):
        with pytest.raises(Fenced):
            await call
    assert (await queue.state()).depth == 1


async def test_equal_epochs_of_two_trainers_do_not_collide(queue: TicketQueue, redis: Redis):
    """The server forgets a begin (its append-only file is a second behind), and a successor gets the same epoch."""
    old = await start(queue)
    await redis.flushall()
    successor = TicketQueue(redis, "run")
    assert await start(successor) == old
    with pytest.raises(Fenced):
        await queue.commit(old, 5, [], 0)


async def test_begin_reissues_what_a_wiped_server_lost(queue: TicketQueue, redis: Redis):
    epoch = await start(queue)
    await fill(queue, 1, 2, 3, 4)
    await redis.flushall()
    with pytest.raises(Fenced):
        await read(queue, epoch)
    assert await begun(queue, low=1, version=0, issued=4, void=1, done=[3], epoch=epoch) == epoch + 1
    assert [await take(queue) for _ in range(3)] == [Reservation(2, 0), Reservation(4, 0), Reservation(5, 0)]


async def test_begin_removes_what_the_checkpoint_has_finished(queue: TicketQueue, redis: Redis):
    """The trainer died between a durable checkpoint and its commit."""
    epoch = await start(queue)
    await fill(queue, 1, 2)
    await take(queue, 600.0)
    epoch = await begun(queue, low=1, version=1, issued=2, void=0, done=[3], epoch=epoch)
    state = await queue.state()
    assert (state.depth, state.leased, state.issued, state.low, state.done) == (1, 0, 3, 1, 1)
    assert [entry.ticket for entry in await read(queue, epoch)] == [2]


async def test_a_trainer_without_checkpoint_forgets_an_earlier_lineage(queue: TicketQueue):
    await start(queue)
    await fill(queue, 1, 2)
    epoch = await start(queue)
    assert epoch == 2
    assert await read(queue, epoch) == []
    assert await take(queue) == Reservation(1, 0)


async def test_begin_is_chunked_and_closed_while_it_works(queue: TicketQueue, redis: Redis):
    """A trainer dies while it recovers ten thousand tickets piece by piece; its successor completes the work."""
    dying = Scripts(redis, queue.keys)
    _, fence = await dying.call("begin", "nonce", 1, 0, 5000, 10_000, 0, 0)
    for _ in range(5):
        assert await dying.fenced("open_chunk", fence.decode(), [500]) == 0
    assert await take(queue) is PublishRefusal.NOT_READY
    assert 0 < (await queue.state()).leased < 10_000
    await begun(queue, low=0, version=5000, issued=10_000, void=0, done=range(500, 9000, 2), epoch=1)
    assert (await queue.state()).leased == 10_000 - 4250
    assert await take(queue) == Reservation(1, 5000)


async def test_what_a_trainer_has_begun_is_seen_only_once_it_opens_the_queue(queue: TicketQueue, redis: Redis):
    """One that begins from an older checkpoint, then finds a newer one, does not show the run going back."""
    epoch = await begun(queue, low=4, version=2, issued=6, void=0, done=(), epoch=1)
    await fill(queue, 5)
    [entry] = await read(queue, epoch)
    successor = TicketQueue(redis, "run")
    epoch = await successor.begin(low=2, version=1, issued=4, void=0, done=(), epoch=1)
    state = await queue.state()
    assert (state.ready, await take(queue)) == (False, PublishRefusal.NOT_READY)
    epoch = await begun(successor, low=4, version=2, issued=6, void=0, done=(), epoch=epoch)
    state = await queue.state()
    assert (state.ready, state.version, state.low) == (True, 2, 4)
    [again] = await read(successor, epoch)
    assert (entry.deliveries, again.ticket, again.deliveries) == (1, 5, 2)  # the first trainer counts, once
    await successor.open(epoch)
    [counted] = await redis.hvals(queue.keys.tries)
    assert int(counted) == 1


async def test_a_checkpoint_that_was_not_committed_is_progress(queue: TicketQueue, redis: Redis):
    """The trainer died after its step became durable; also if its successor sees that only at a second look."""
    epoch = await start(queue)
    await fill(queue, 1, 2, 3)
    for version in (1, 2):
        await read(queue, epoch)
        successor = TicketQueue(redis, "run")
        if version == 2:
            epoch = await successor.begin(low=1, version=1, issued=3, void=0, done=(), epoch=epoch)
        epoch = await begun(successor, low=version, version=version, issued=3, void=0, done=(), epoch=epoch)
        queue = successor
    [entry] = await read(queue, epoch)
    assert (entry.ticket, entry.deliveries) == (3, 1)


@pytest.mark.parametrize("committed", [True, False])
async def test_a_step_forgets_who_died_before_it(queue: TicketQueue, committed: bool):
    epoch = await start(queue)
    await fill(queue, 1, 2)
    await read(queue, epoch)
    epoch = await begun(queue, low=0, version=0, issued=2, void=0, done=(), epoch=epoch)
    first, second = await read(queue, epoch)
    assert (first.deliveries, second.deliveries) == (2, 2)
    if committed:
        await queue.commit(epoch, 1, [Finished(1, first.entry_id)], 0)
    epoch = await begun(queue, low=1, version=1, issued=2, void=0, done=(), epoch=epoch)
    [second] = await read(queue, epoch)
    assert second.deliveries == 1


async def test_what_is_delivered_after_a_step_was_held_by_no_trainer_that_died(queue: TicketQueue):
    epoch = await start(queue)
    await fill(queue, 1, 2)
    await read(queue, epoch)
    epoch = await begun(queue, low=0, version=0, issued=2, void=0, done=(), epoch=epoch)
    [first] = await read(queue, epoch, count=1)
    await queue.commit(epoch, 1, [Finished(1, first.entry_id)], 0)
    [second] = await read(queue, epoch)
    assert (first.deliveries, second.deliveries) == (2, 1)


async def test_a_commit_of_nothing_new_wakes_nobody(queue: TicketQueue, redis: Redis):
    epoch = await start(queue)
    before = await redis.hget(queue.keys.state, "wake")
    await queue.commit(epoch, 0, [], 0)
    assert await redis.hget(queue.keys.state, "wake") == before
    await queue.commit(epoch, 1, [], 0)
    assert await redis.hget(queue.keys.state, "wake") != before


async def test_a_server_that_forgot_the_end_of_an_opening_fences_its_trainer(queue: TicketQueue, redis: Redis):
    """It lost its last second: `begin` is there, the queue is closed, and nobody else would open it."""
    epoch = await queue.begin(low=0, version=0, issued=0, void=0, done=(), epoch=0)
    closed = await redis.hgetall(queue.keys.state)
    await queue.open(epoch)
    await redis.hset(queue.keys.state, mapping=closed)
    with pytest.raises(Fenced):
        await queue.commit(epoch, 0, [], 0)


async def test_who_opens_the_queue_tells_of_which_run_it_is(queue: TicketQueue):
    assert (await queue.state()).lineage == ()
    epoch = await queue.begin(low=0, version=4, issued=0, void=0, done=(), epoch=1)
    await queue.open(epoch, ((1, 0), (epoch, 4)), "f00d")
    state = await queue.state()
    assert (state.ready, state.lineage, state.beginning) == (True, ((1, 0), (2, 4)), "f00d")
    later = await queue.begin(low=0, version=4, issued=0, void=0, done=(), epoch=epoch)
    await queue.open(later)
    assert (await queue.state()).lineage == ((later, 0),)


async def test_a_trainer_that_was_replaced_does_not_open_the_queue(queue: TicketQueue, redis: Redis):
    old = await queue.begin(low=0, version=0, issued=0, void=0, done=(), epoch=0)
    await TicketQueue(redis, "run").begin(low=0, version=0, issued=0, void=0, done=(), epoch=old)
    with pytest.raises(Fenced):
        await queue.open(old)
    assert not (await queue.state()).ready


async def test_a_rollback_is_issued_in_order_and_bounded(queue: TicketQueue):
    """After a return to a much older checkpoint the pool is large, but no more than the bound is in flight."""
    epoch = await begun(queue, low=1000, version=500, issued=1000, void=0, done=(), epoch=7)
    await fill(queue, 1001, 1002, 1003, 1004)
    epoch = await begun(queue, low=900, version=450, issued=900, void=0, done=(), epoch=epoch)
    taken = [await take(queue) for _ in range(CAP + 1)]
    assert taken == [Reservation(901 + i, 450) for i in range(CAP)] + [PublishRefusal.FULL]
    assert await queue.renew(902, 0.0)
    assert await take(queue) == Reservation(902, 450)


class LosesReplies(TicketQueue):
    """The server delivers, but while `cut` is set the client never sees the answer."""

    cut = False

    async def _fetch(self, *args: Any, **kwargs: Any) -> Any:
        rows = await super()._fetch(*args, **kwargs)
        if self.cut:
            raise QueueUnavailable("cut")
        return rows


async def test_a_lost_reply_is_read_again(redis: Redis):
    queue = LosesReplies(redis, "run")
    epoch = await start(queue)
    await fill(queue, 1, 2, 3)
    held = await read(queue, epoch, count=1)
    queue.cut = True
    for _ in range(2):
        with pytest.raises(QueueUnavailable):
            await read(queue, epoch, count=1)
    queue.cut = False
    rest = [*await read(queue, epoch), *await read(queue, epoch)]
    assert [entry.ticket for entry in [*held, *rest]] == [1, 2, 3]


async def test_pending_entries_that_were_deleted_are_skipped(queue: TicketQueue, redis: Redis):
    epoch = await start(queue)
    await fill(queue, 1, 2)
    first, _ = await read(queue, epoch)
    await redis.xdel(queue.keys.stream, first.entry_id)
    assert queue._lineage is not None
    queue._lineage.cursor = "0"
    queue._lineage.held.clear()
    assert [entry.ticket for entry in await read(queue, epoch)] == [2]


async def test_a_commit_lost_by_the_server_is_repeated(queue: TicketQueue, redis: Redis):
    """Restores the server's state of before the commit, as a crash with a stale append-only file does."""
    epoch = await start(queue)
    await fill(queue, 1, 2)
    first, second = await read(queue, epoch)
    before = await snapshot(redis)
    await queue.commit(epoch, 1, [Finished(1, first.entry_id), Finished(2, second.entry_id)], 0)
    await restore(redis, before)
    assert (await queue.state()).depth == 2
    assert queue._lineage is not None
    queue._lineage.cursor = "0"
    assert await read(queue, epoch) == []
    state = await queue.state()
    assert (state.depth, state.low, state.version) == (0, 2, 1)


async def test_a_later_commit_heals_lost_ones(queue: TicketQueue, redis: Redis):
    epoch = await start(queue)
    await fill(queue, 1, 2, 3)
    entries = await read(queue, epoch)
    before = await snapshot(redis)
    await queue.commit(epoch, 1, [Finished(e.ticket, e.entry_id) for e in entries[:2]], 0)
    await restore(redis, before)
    await queue.commit(epoch, 2, [Finished(3, entries[2].entry_id)], 0)
    state = await queue.state()
    assert (state.depth, state.low, state.done) == (0, 3, 0)


async def test_commits_are_idempotent_and_may_be_large(queue: TicketQueue):
    n = 1700
    epoch = await begun(queue, low=0, version=0, issued=n, void=0, done=(), epoch=3)
    finished = [Finished(ticket) for ticket in range(2, n + 1)]
    for _ in range(2):
        await queue.commit(epoch, 7, finished, n - 1)
    assert (await queue.state()).done == n - 1
    for _ in range(2):
        await queue.commit(epoch, 8, [Finished(1)], n - 1)
    state = await queue.state()
    assert (state.low, state.done, state.leased, state.void, state.version) == (n, 0, 0, n - 1, 8)


async def test_deliveries_count_incarnations_without_progress(queue: TicketQueue):
    epoch = await start(queue)
    await fill(queue, 1, 2)
    seen = []
    for _ in range(3):
        [entry] = await read(queue, epoch, count=1)
        seen.append(entry.deliveries)
        epoch = await begun(queue, low=0, version=0, issued=2, void=0, done=(), epoch=epoch)
    first, second = await read(queue, epoch)
    assert (seen, first.deliveries, second.deliveries) == ([1, 2, 3], 4, 1)
    await queue.commit(epoch, 1, [Finished(1, first.entry_id)], 0)
    epoch = await begun(queue, low=1, version=1, issued=2, void=0, done=(), epoch=epoch)
    [second] = await read(queue, epoch)
    assert second.deliveries == 1


async def test_orderly_stops_are_not_counted_as_deliveries(queue: TicketQueue):
    epoch = await start(queue)
    await fill(queue, 1)
    for _ in range(4):
        [entry] = await read(queue, epoch)
        assert entry.deliveries == 1
        await queue.leave(epoch)
        epoch = await begun(queue, low=0, version=0, issued=1, void=0, done=(), epoch=epoch)
    await read(queue, epoch)
    epoch = await begun(queue, low=0, version=0, issued=1, void=0, done=(), epoch=epoch)
    [entry] = await read(queue, epoch)
    assert entry.deliveries == 2


async def test_a_replaced_trainer_cannot_leave_for_its_successor(queue: TicketQueue, redis: Redis):
    old = await start(queue)
    await begun(TicketQueue(redis, "run"), low=0, version=0, issued=0, void=0, done=(), epoch=old)
    with pytest.raises(Fenced):
        await queue.leave(old)


async def test_an_epoch_is_above_all_that_the_caller_knows_of(queue: TicketQueue):
    assert await begun(queue, low=0, version=0, issued=0, void=0, done=(), epoch=0, above=7) == 8
    assert await begun(queue, low=0, version=0, issued=0, void=0, done=(), epoch=0, above=3) == 9


async def test_a_poisoned_entry_is_kept_for_inspection(queue: TicketQueue, redis: Redis):
    epoch = await start(queue)
    await fill(queue, 1)
    [entry] = await read(queue, epoch)
    await queue.dead_letter(epoch, entry, "DecodeError")
    await queue.commit(epoch, 0, [Finished(1, entry.entry_id)], 1)
    [(_, fields)] = await command(redis, "XRANGE", queue.keys.dead, "-", "+")
    assert fields == {b"t": b"1", b"reason": b"DecodeError", b"d": b"group 1"}
    assert (await queue.state()).dead == 1


async def test_waiting_ends_with_a_commit_a_begin_or_a_late_lease(queue: TicketQueue, redis_url: str):
    async with connect(redis_url) as other, asyncio.timeout(60):
        producer = TicketQueue(other, "run")

        async def wait(lease_s: float = 60) -> Reservation | PublishRefusal:
            return await producer.reserve_wait(lease_s, BATCH, ETA, TOTAL, deadline_s=30)

        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(wait())
            epoch = await start(queue)
        assert waiting.result() == Reservation(1, 0)
        assert await wait() == Reservation(2, 0)
        await fill(queue, 1, 2, 3, 4)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(wait())
            await queue.commit(epoch, 1, [Finished(1), Finished(2)], 0)
        assert waiting.result() == Reservation(5, 1)
        assert await wait(lease_s=0.03) == Reservation(6, 1)
        assert await wait() == Reservation(6, 1)  # its lease of 30 ms ran out


async def test_waiting_has_a_deadline(queue: TicketQueue):
    await start(queue)
    await fill(queue, 1, 2, 3, 4)
    async with asyncio.timeout(60):
        assert await queue.reserve_wait(1, BATCH, ETA, TOTAL, deadline_s=0.05) is PublishRefusal.FULL


async def test_a_run_name_cannot_leave_its_hash_tag(redis: Redis):
    with pytest.raises(ConfigError, match="run name"):
        TicketQueue(redis, "a}b")


async def test_runs_do_not_meet(redis: Redis):
    one, two = TicketQueue(redis, "one"), TicketQueue(redis, "two")
    await start(one)
    assert await take(two) is PublishRefusal.NOT_READY
    assert all(key.startswith(b"{one}:") for key in await command(redis, "KEYS", "*"))


async def test_why_a_trainer_trains_no_more_is_told_until_another_begins(queue: TicketQueue):
    epoch = await start(queue)
    assert (await queue.state()).refused == ""
    await queue.leave(epoch, "step 3 gave numbers that are not finite")
    await queue.leave(epoch)
    assert (await queue.state()).refused == "step 3 gave numbers that are not finite"
    await begun(queue, low=0, version=0, issued=0, void=0, done=(), epoch=epoch)
    assert (await queue.state()).refused == ""


async def test_over_sampling_lowers_the_number_of_groups_ahead_and_never_raises_it(queue):
    """Three groups beyond the durable steps, though staleness allows four; voids and steps make room."""
    await start(queue)

    async def issued(ahead):
        tickets = []
        while isinstance(got := await queue.reserve(60, BATCH, ETA, TOTAL, ahead), Reservation):
            tickets.append(got.ticket)
        assert got is PublishRefusal.FULL
        return tickets

    assert await issued(3) == [1, 2, 3]
    assert await issued(100) == [4]
