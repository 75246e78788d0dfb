"""The queue as a state machine against a real server: any order of work and faults keeps the invariants.

Faults: lost leases, lost replies, duplicate and stray groups, a trainer that crashes with uncommitted work, between
checkpoint and commit, or while it begins, a replaced trainer that goes on, a lost newest checkpoint, a wiped server,
a server that loses some of its keys or parts of them, one that forgets its last moments (its append-only file is up to
a second behind), and a clock that jumps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.asyncio import Redis

from shared.errors import Fenced
from shared.queue.client import command, connect
from shared.queue.queue import Finished, Published, Reservation, StreamEntry, TicketQueue
from shared.queue.scripts import Scripts
from shared.queue.server import ServerSpec
from shared.run.progress import TicketProgress
from tests.support.redis import begun

BATCH, ETA, STEPS = 2, 2, 12
CAP, TOTAL = (ETA + 1) * BATCH, STEPS * BATCH
TTL_S = 600.0
END = ("goes on", "commits", "commits", "dies before its commit")
JUMP_MS = 3_600_000
FAULTS = (
    "clock_jumps",
    "crash",
    "crash_in_begin",
    "lose_a_key",
    "lose_a_lease",
    "lose_a_part",
    "lose_a_reply",
    "lose_the_newest_checkpoint",
    "publish_stray",
    "save",
    "server_forgets",
    "wipe",
    "zombie_goes_on",
)
PRODUCE = st.fixed_dictionaries(
    {
        "n": st.integers(0, CAP),
        "late": st.booleans(),
        "published": st.sets(st.integers(0, CAP), min_size=3),
        "keep": st.booleans(),
    }
)
CONSUME = st.fixed_dictionaries(
    {
        "count": st.integers(0, CAP),
        "filtered": st.booleans(),
        "steps": st.integers(0, ETA + 1),
        "end": st.sampled_from(END),
    }
)
ACTIONS = st.one_of(
    st.tuples(st.just("produce"), PRODUCE),
    st.tuples(st.just("consume"), CONSUME),
    st.tuples(st.sampled_from(FAULTS), st.fixed_dictionaries({"pick": st.integers(0, 100)})),
)


@dataclass(frozen=True)
class Checkpoint:
    """What a trainer would have on disk; `trained` stands for the weights."""

    epoch: int = 0
    version: int = 0
    issued: int = 0
    low: int = 0
    done: frozenset[int] = frozenset()
    void: int = 0
    trained: tuple[int, ...] = ()


@dataclass
class TrainerModel:
    """One incarnation, in arrival order; a checkpoint at most every max_staleness + 1 steps."""

    queue: TicketQueue
    epoch: int
    version: int
    progress: TicketProgress
    trained: list[int]
    hand: list[StreamEntry] = field(default_factory=list)
    uncommitted: list[Finished] = field(default_factory=list)

    def finish(self, entry: StreamEntry, *, void: bool) -> None:
        assert self.progress.finish(entry.ticket, void=void)
        self.hand.remove(entry)
        self.uncommitted.append(Finished(entry.ticket, entry.entry_id))
        if not void:
            self.trained.append(entry.ticket)

    def drop_stale(self) -> None:
        for entry in [e for e in self.hand if self.version - int(e.payload) > ETA]:
            self.finish(entry, void=True)

    def step(self) -> bool:
        self.drop_stale()
        if len(self.hand) < BATCH or self.version == STEPS:
            return False
        for entry in self.hand[:BATCH]:
            self.finish(entry, void=False)
        self.version += 1
        return True

    def checkpoint(self, issued: int) -> Checkpoint:
        progress = self.progress
        return Checkpoint(
            self.epoch, self.version, issued, progress.low, frozenset(progress.done), progress.void, tuple(self.trained)
        )


class QueueMachine(RuleBasedStateMachine):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = connect(url)
        self.do(command(self.redis, "FLUSHALL"))
        self.queue = TicketQueue(self.redis, "run")
        self.durable = [Checkpoint()]
        self.trainer: TrainerModel | None = None
        self.zombies: list[TrainerModel] = []
        self.reserved: dict[int, int] = {}
        self.saved: dict[bytes, bytes] | None = None
        self.rolled_back = False

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def state(self) -> Any:
        return self.do(self.queue.state())

    @rule(action=ACTIONS)
    def act(self, action: tuple[str, dict[str, Any]]) -> None:
        """One rule for all: hypothesis switches rules off at random, and half a queue gets nowhere."""
        name, arguments = action
        getattr(self, name)(**arguments)

    # Work

    def produce(self, n: int, late: bool, published: set[int], keep: bool) -> None:
        for _ in range(n):
            self.reserve(0.0 if late else TTL_S)
        known = sorted(self.reserved)
        for ticket in {known[pick % len(known)] for pick in published if known}:
            self.publish(ticket, keep)

    def reserve(self, ttl_s: float) -> None:
        before = self.state()
        got = self.do(self.queue.reserve(ttl_s, BATCH, ETA, TOTAL))
        if isinstance(got, Reservation):
            assert before.ready
            assert got.version == before.version
            if got.ticket > before.issued:
                assert got.ticket - before.void <= (before.version + ETA + 1) * BATCH
            self.reserved[got.ticket] = got.version

    def publish(self, ticket: int, keep: bool) -> None:
        before = self.state()
        answer = self.do(self.queue.publish(ticket, b"%d" % self.reserved[ticket]))
        assert (answer is Published.NOT_READY) == (not before.ready)
        assert not (answer is Published.UNKNOWN and ticket <= before.issued)
        assert self.state().depth == before.depth + (answer is Published.QUEUED)
        if not keep and answer is not Published.NOT_READY:
            del self.reserved[ticket]

    def consume(self, count: int, filtered: bool, steps: int, end: str) -> None:
        if self.trainer is None:
            self.begin()
        self.read(count)
        trainer = self.trainer
        if trainer is None:
            return
        if filtered and trainer.hand:
            trainer.finish(trainer.hand[-1], void=True)
        for _ in range(min(steps, self.durable[-1].version + ETA + 1 - trainer.version)):
            trainer.step()
        if end != "goes on":
            self.durable.append(trainer.checkpoint(self.state().issued))
        if end == "commits":
            self.commit(trainer)
        elif end == "dies before its commit":
            self.die(trainer)

    def begin(self) -> None:
        checkpoint = self.durable[-1]
        queue = TicketQueue(self.redis, "run")
        args = (
            checkpoint.low,
            checkpoint.version,
            checkpoint.issued,
            checkpoint.void,
            checkpoint.done,
            checkpoint.epoch,
        )
        epoch = self.do(begun(queue, *args))
        assert epoch > checkpoint.epoch
        assert self.finished() == (checkpoint.low, checkpoint.done)
        progress = TicketProgress(checkpoint.low, checkpoint.done, checkpoint.void)
        self.trainer = TrainerModel(queue, epoch, checkpoint.version, progress, list(checkpoint.trained))
        if checkpoint.epoch == 0:
            self.reserved.clear()
            self.durable.append(self.trainer.checkpoint(issued=0))

    def read(self, count: int) -> None:
        trainer = self.trainer
        if trainer is None or count == 0:
            return
        try:
            entries = self.do(trainer.queue.read(trainer.epoch, "trainer", count, 0))
        except Fenced:
            self.die(trainer)
            return
        for entry in entries:
            assert not trainer.progress.is_finished(entry.ticket)
            assert entry.ticket not in {e.ticket for e in trainer.hand}
            trainer.hand.append(entry)

    def commit(self, trainer: TrainerModel) -> None:
        try:
            self.do(trainer.queue.commit(trainer.epoch, trainer.version, trainer.uncommitted, trainer.progress.void))
        except Fenced:
            self.die(trainer)
            return
        trainer.uncommitted.clear()
        if not self.rolled_back:
            assert self.finished() == (trainer.progress.low, trainer.progress.done)

    def finished(self) -> tuple[int, set[int]]:
        """What the server takes for finished: (low, tickets above it)."""
        return self.state().low, set(map(int, self.do(command(self.redis, "SMEMBERS", self.queue.keys.done))))

    def die(self, trainer: TrainerModel) -> None:
        self.trainer = None
        self.zombies.append(trainer)
        self.rolled_back |= trainer.progress.void > self.durable[-1].void

    # Faults

    def crash(self, pick: int) -> None:
        if self.trainer:
            self.die(self.trainer)

    def crash_in_begin(self, pick: int) -> None:
        self.crash(pick)
        self.do(self.half_a_begin(self.durable[-1]))

    async def half_a_begin(self, checkpoint: Checkpoint) -> None:
        scripts = Scripts(self.redis, self.queue.keys)
        at = (checkpoint.epoch, checkpoint.low, checkpoint.version, checkpoint.issued, checkpoint.void, 0)
        _, fence = await scripts.call("begin", "half", *at)
        await scripts.fenced("open_chunk", fence.decode(), [1])

    def lose_the_newest_checkpoint(self, pick: int) -> None:
        self.crash(pick)
        if len(self.durable) > 2:
            self.durable.pop()
            self.rolled_back = True

    def lose_a_lease(self, pick: int) -> None:
        if self.reserved:
            self.do(self.queue.renew(sorted(self.reserved)[pick % len(self.reserved)], 0.0))

    def lose_a_reply(self, pick: int) -> None:
        """The server delivers entries, the connection breaks before the trainer sees them."""
        lineage = self.trainer.queue._lineage if self.trainer else None
        if lineage is None:
            return
        where = ("GROUP", f"t{lineage.fence}", "trainer", "COUNT", 1 + pick % 3, "STREAMS", self.queue.keys.stream, ">")
        with suppress(Fenced):
            self.do(command(self.redis, "XREADGROUP", *where))
        lineage.cursor = "0"

    def publish_stray(self, pick: int) -> None:
        before = self.state()
        answer = self.do(self.queue.publish(before.issued + 1 + pick, b"0"))
        assert answer is (Published.UNKNOWN if before.ready else Published.NOT_READY)

    def wipe(self, pick: int) -> None:
        self.do(command(self.redis, "FLUSHALL"))
        self.saved = None

    def lose_a_key(self, pick: int) -> None:
        """One key, or two, or one is replaced by a key of another type."""
        names = self.keys()
        if not names:
            return
        first, second = names[pick % len(names)], names[pick // 7 % len(names)]
        self.do(command(self.redis, "DEL", first, second))
        if pick % 3 == 0:
            self.do(command(self.redis, "SET", first, "something else"))
        self.recognise()

    def lose_a_part(self, pick: int) -> None:
        """A field, a member, an entry, or the consumer groups."""
        names = self.keys()
        if names:
            self.do(lose_a_part_of(self.redis, names[pick % len(names)], pick))
            self.recognise()

    def clock_jumps(self, pick: int) -> None:
        """By an hour: what the queue read last is as far away in the other direction."""
        if self.trainer and self.do(command(self.redis, "HEXISTS", self.queue.keys.state, "wall")):
            jump = JUMP_MS if pick % 2 else -JUMP_MS
            self.do(command(self.redis, "HINCRBY", self.queue.keys.state, "wall", jump))

    def keys(self) -> list[bytes]:
        return sorted(self.do(command(self.redis, "KEYS", "*")))

    def recognise(self) -> None:
        """Any script finds that the data are not whole; the trainer may go on until it reads or commits."""
        self.saved = None
        self.do(self.queue.renew(1, TTL_S))

    def save(self, pick: int) -> None:
        if self.trainer:
            self.saved = self.do(self.dump())

    async def dump(self) -> dict[bytes, bytes]:
        return {key: await command(self.redis, "DUMP", key) for key in await command(self.redis, "KEYS", "*")}

    def server_forgets(self, pick: int) -> None:
        """Back to what was saved; the trainer notices by its broken connection, or not at all."""
        if not self.saved or not self.trainer:
            return
        self.do(command(self.redis, "FLUSHALL"))
        for key, dump in self.saved.items():
            self.do(command(self.redis, "RESTORE", key, 0, dump))
        self.rolled_back = True
        if pick % 2 and self.trainer.queue._lineage:
            self.trainer.queue._lineage.cursor = "0"

    def zombie_goes_on(self, pick: int) -> None:
        """Unless the server has forgotten the successor, a replaced trainer changes nothing."""
        if not self.zombies or self.trainer is None:
            return
        zombie = self.zombies[pick % len(self.zombies)]
        if self.do(command(self.redis, "HGET", self.queue.keys.state, "fence")) == fence(zombie):
            return
        before = self.do(self.dump())
        with pytest.raises(Fenced):
            self.do(zombie.queue.commit(zombie.epoch, zombie.version, zombie.uncommitted, zombie.progress.void))
        with pytest.raises(Fenced):
            self.do(zombie.queue.read(zombie.epoch, "trainer", 1, 0))
        assert self.do(self.dump()) == before

    # What must hold

    @invariant()
    def every_ticket_is_somewhere(self) -> None:
        state = self.state()
        if not state.ready:
            return
        queued, leased, done, stream = self.do(self.contents())
        finished = set(range(1, state.low + 1)) | done
        assert sorted([*queued, *leased, *(finished & set(range(1, state.issued + 1)))]) == list(
            range(1, state.issued + 1)
        )
        assert sorted(queued.values()) == stream
        assert len(stream) <= 2 * CAP + len(done)
        assert all(ticket > state.low for ticket in done)
        if not self.rolled_back:
            assert len(queued) + len(leased) <= CAP
            assert state.issued - state.void <= (state.version + ETA + 1) * BATCH

    async def contents(self) -> tuple[dict[int, bytes], set[int], set[int], list[bytes]]:
        keys = self.queue.keys
        queued = await command(self.redis, "HGETALL", keys.seen)
        leased = await command(self.redis, "ZRANGE", keys.lease, 0, -1)
        done = await command(self.redis, "SMEMBERS", keys.done)
        stream = await command(self.redis, "XRANGE", keys.stream, "-", "+")
        return (
            {int(t): e for t, e in queued.items()},
            set(map(int, leased)),
            set(map(int, done)),
            sorted(e for e, _ in stream),
        )

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        for trained in (self.durable[-1].trained, self.trainer.trained if self.trainer else ()):
            assert len(set(trained)) == len(trained)

    def teardown(self) -> None:
        """Without further faults the run ends: all steps made, each with its own tickets."""
        try:
            for _ in range(30 * STEPS):
                if self.durable[-1].version == STEPS:
                    break
                self.one_calm_round()
            assert len(set(self.durable[-1].trained)) == TOTAL
            self.every_ticket_is_somewhere()
        finally:
            self.do(self.redis.aclose())
            self.runner.close()

    def one_calm_round(self) -> None:
        self.produce(n=CAP, late=False, published=set(range(CAP)), keep=False)
        for ticket in range(1, self.state().issued + 1):
            self.do(self.queue.renew(ticket, 0.0))
        self.consume(count=CAP, filtered=False, steps=ETA + 1, end="commits")


async def lose_a_part_of(redis: Redis, key: bytes, pick: int) -> None:
    match (await command(redis, "TYPE", key)).decode():
        case "hash":
            fields = sorted(await command(redis, "HKEYS", key))
            await command(redis, "HDEL", key, fields[pick % len(fields)])
        case "zset":
            await command(redis, "ZPOPMIN", key)
        case "set":
            await command(redis, "SPOP", key)
        case _ if pick % 2:
            await command(redis, "XTRIM", key, "MAXLEN", pick % 4)
        case _:
            for group in await command(redis, "XINFO", "GROUPS", key):
                await command(redis, "XGROUP", "DESTROY", key, group[1])


def fence(trainer: TrainerModel) -> bytes | None:
    lineage = trainer.queue._lineage
    return lineage.fence.encode() if lineage else None


@pytest.mark.parametrize("n_examples", [20, pytest.param(60, marks=pytest.mark.long)])
def test_any_order_of_work_and_faults(redis_server: ServerSpec, n_examples: int):
    class Machine(QueueMachine):
        def __init__(self) -> None:
            super().__init__(redis_server.url)

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=n_examples, stateful_step_count=40, deadline=None)
    )
