"""The queue as a state machine against a real server: any order of work and faults keeps the invariants.

Faults: lost leases, duplicate and stray groups, a trainer that crashes with uncommitted work, between checkpoint and
commit, or while it begins, a replaced trainer that goes on, a lost newest checkpoint, a wiped server, and a server that
forgets its last moments (its append-only file is up to a second behind).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shared.errors import Fenced
from shared.queue.client import command, connect
from shared.queue.progress import Progress
from shared.queue.queue import Entry, Finished, Published, Reservation, TicketQueue
from shared.queue.scripts import Scripts
from shared.queue.server import ServerSpec

BATCH, ETA, STEPS = 2, 2, 5
CAP, TOTAL = (ETA + 1) * BATCH, STEPS * BATCH
TTL_S = 600.0


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
    """One incarnation, in arrival order; a checkpoint at most every eta + 1 steps."""

    queue: TicketQueue
    epoch: int
    version: int
    progress: Progress
    trained: list[int]
    hand: list[Entry] = field(default_factory=list)
    uncommitted: list[Finished] = field(default_factory=list)

    def finish(self, entry: Entry, *, void: bool) -> None:
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
        self.do(self.redis.flushall())
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

    # Producers

    @rule(n=st.integers(1, CAP), late=st.booleans())
    def reserve(self, n: int, late: bool) -> None:
        for _ in range(n):
            before = self.state()
            got = self.do(self.queue.reserve(0.0 if late else TTL_S, BATCH, ETA, TOTAL))
            if not isinstance(got, Reservation):
                return
            assert before.ready
            assert got.version == before.version
            if got.ticket > before.issued:
                assert got.ticket - before.void <= (before.version + ETA + 1) * BATCH
            self.reserved[got.ticket] = got.version

    @precondition(lambda self: self.reserved)
    @rule(tickets=st.sets(st.integers(0, CAP), min_size=1), keep=st.booleans())
    def publish(self, tickets: set[int], keep: bool) -> None:
        known = sorted(self.reserved)
        for ticket in {known[pick % len(known)] for pick in tickets}:
            before = self.state()
            answer = self.do(self.queue.publish(ticket, b"%d" % self.reserved[ticket]))
            assert (answer is Published.NOT_READY) == (not before.ready)
            assert not (answer is Published.UNKNOWN and ticket <= before.issued)
            assert self.state().depth == before.depth + (answer is Published.QUEUED)
            if not keep and answer is not Published.NOT_READY:
                del self.reserved[ticket]

    @rule(beyond=st.integers(1, 50))
    def publish_stray(self, beyond: int) -> None:
        before = self.state()
        answer = self.do(self.queue.publish(before.issued + beyond, b"0"))
        assert answer is (Published.UNKNOWN if before.ready else Published.NOT_READY)

    @precondition(lambda self: self.reserved)
    @rule(pick=st.integers(0, 100), ttl_s=st.sampled_from([0.0, TTL_S]))
    def renew_or_lose_a_lease(self, pick: int, ttl_s: float) -> None:
        self.do(self.queue.renew(sorted(self.reserved)[pick % len(self.reserved)], ttl_s))

    # The trainer

    @precondition(lambda self: self.trainer is None)
    @rule(interrupted=st.booleans())
    def begin(self, interrupted: bool) -> None:
        checkpoint = self.durable[-1]
        if interrupted:
            self.do(self.half_a_begin(checkpoint))
        queue = TicketQueue(self.redis, "run")
        args = (checkpoint.low, checkpoint.version, checkpoint.issued, checkpoint.void, checkpoint.done, checkpoint.epoch)
        epoch = self.do(queue.begin(*args))
        assert epoch > checkpoint.epoch
        progress = Progress(checkpoint.low, checkpoint.done, checkpoint.void)
        self.trainer = TrainerModel(queue, epoch, checkpoint.version, progress, list(checkpoint.trained))
        if checkpoint.epoch == 0:
            self.reserved.clear()
            self.durable.append(self.trainer.checkpoint(issued=0))

    async def half_a_begin(self, checkpoint: Checkpoint) -> None:
        scripts = Scripts(self.redis, self.queue.keys)
        at = (checkpoint.epoch, checkpoint.low, checkpoint.version, checkpoint.issued, checkpoint.void)
        _, fence = await scripts.call("begin", "half", *at)
        await scripts.fenced("begin_chunk", fence.decode(), [1])

    @precondition(lambda self: self.trainer)
    @rule(count=st.integers(1, CAP))
    def read(self, count: int) -> None:
        trainer = self.trainer
        assert trainer
        try:
            entries = self.do(trainer.queue.read(trainer.epoch, "trainer", count, 0))
        except Fenced:
            return self.die(trainer)
        for entry in entries:
            assert not trainer.progress.is_finished(entry.ticket)
            assert entry.ticket not in {e.ticket for e in trainer.hand}
            trainer.hand.append(entry)

    @precondition(lambda self: self.trainer)
    @rule()
    def step(self) -> None:
        trainer = self.trainer
        assert trainer
        if trainer.version - self.durable[-1].version <= ETA:
            trainer.step()

    @precondition(lambda self: self.trainer and self.trainer.hand)
    @rule(pick=st.integers(0, 100))
    def filter_one(self, pick: int) -> None:
        assert self.trainer
        self.trainer.finish(self.trainer.hand[pick % len(self.trainer.hand)], void=True)

    @precondition(lambda self: self.trainer)
    @rule(commits=st.booleans())
    def checkpoint(self, commits: bool) -> None:
        trainer = self.trainer
        assert trainer
        self.durable.append(trainer.checkpoint(self.state().issued))
        if not commits:
            return self.die(trainer)
        try:
            self.do(self.commit(trainer))
        except Fenced:
            self.die(trainer)

    async def commit(self, trainer: TrainerModel) -> None:
        await trainer.queue.commit(trainer.epoch, trainer.version, trainer.uncommitted, trainer.progress.void)
        trainer.uncommitted.clear()

    # Faults

    def die(self, trainer: TrainerModel) -> None:
        self.trainer = None
        self.zombies.append(trainer)
        self.rolled_back |= trainer.progress.void > self.durable[-1].void

    @precondition(lambda self: self.trainer)
    @rule(restarts=st.booleans())
    def crash(self, restarts: bool) -> None:
        assert self.trainer
        self.die(self.trainer)
        if restarts:
            self.begin(interrupted=False)

    @precondition(lambda self: self.trainer is None and len(self.durable) > 2)
    @rule()
    def lose_the_newest_checkpoint(self) -> None:
        self.durable.pop()
        self.rolled_back = True

    @precondition(lambda self: self.trainer)
    @rule()
    def save(self) -> None:
        self.saved = self.do(self.dump())

    async def dump(self) -> dict[bytes, bytes]:
        return {key: await command(self.redis, "DUMP", key) for key in await command(self.redis, "KEYS", "*")}

    @precondition(lambda self: self.trainer and self.saved)
    @rule(reconnects=st.booleans())
    def server_forgets(self, reconnects: bool) -> None:
        """Back to what was saved; the trainer notices by its broken connection, or not at all."""
        assert self.saved
        assert self.trainer
        self.do(self.redis.flushall())
        for key, dump in self.saved.items():
            self.do(command(self.redis, "RESTORE", key, 0, dump))
        self.rolled_back = True
        if reconnects and self.trainer.queue._lineage:
            self.trainer.queue._lineage.cursor = "0"

    @precondition(lambda self: self.saved and self.durable[-1].version)
    @rule(noticed=st.booleans())
    def wipe(self, noticed: bool) -> None:
        self.do(self.redis.flushall())
        self.saved = None
        if noticed and self.trainer:
            self.die(self.trainer)
            self.begin(interrupted=False)

    @precondition(lambda self: self.trainer and self.zombies)
    @rule(pick=st.integers(0, 100))
    def zombie_goes_on(self, pick: int) -> None:
        """Unless the server has forgotten the successor, a replaced trainer changes nothing."""
        zombie = self.zombies[pick % len(self.zombies)]
        assert self.trainer
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
        assert sorted([*queued, *leased, *(finished & set(range(1, state.issued + 1)))]) == list(range(1, state.issued + 1))
        assert sorted(queued.values()) == stream
        assert len(stream) <= 2 * CAP + len(done)
        if not self.rolled_back:
            assert len(queued) + len(leased) <= CAP
            assert state.issued - state.void <= (state.version + ETA + 1) * BATCH

    async def contents(self) -> tuple[dict[int, bytes], set[int], set[int], list[bytes]]:
        keys = self.queue.keys
        queued = await command(self.redis, "HGETALL", keys.seen)
        leased = await command(self.redis, "ZRANGE", keys.lease, 0, -1)
        done = await command(self.redis, "SMEMBERS", keys.done)
        stream = await command(self.redis, "XRANGE", keys.stream, "-", "+")
        return {int(t): e for t, e in queued.items()}, set(map(int, leased)), set(map(int, done)), sorted(e for e, _ in stream)

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
        if self.trainer is None:
            self.begin(interrupted=False)
        for _ in range(CAP):
            self.reserve(n=1, late=False)
        for ticket in list(self.reserved):
            self.do(self.queue.publish(ticket, b"%d" % self.reserved.pop(ticket)))
        for ticket in range(1, self.state().issued + 1):
            self.do(self.queue.renew(ticket, 0.0))
        self.read(count=4)
        while self.trainer and self.trainer.step():
            pass
        if self.trainer:
            self.checkpoint(commits=True)


def fence(trainer: TrainerModel) -> bytes | None:
    lineage = trainer.queue._lineage
    return lineage.fence.encode() if lineage else None


def test_any_order_of_work_and_faults(redis_server: ServerSpec):
    run_state_machine_as_test(
        lambda: QueueMachine(redis_server.url),
        settings=settings(max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)),
    )
