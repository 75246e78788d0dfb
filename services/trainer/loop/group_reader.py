"""Background reader of groups, from the queue into the buffer."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from services.trainer.groups.group_buffer import GroupBuffer
from services.trainer.interfaces import TrainPlan, TrainQueue
from services.trainer.loop.settlement import Settlement
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.errors import Unavailable
from shared.process import tracing

_CONSUMER = "trainer"
_READ_COUNT = 32
_READ_BLOCK_MS = 1000
_ATTEND_S = 2.0


class GroupReader:
    """Reads groups while the buffer has room.

    While it has none, and after an empty read, the reader checks that this trainer still owns the queue.
    """

    def __init__(
        self,
        plan: TrainPlan,
        queue: TrainQueue,
        epoch: int,
        buffer: GroupBuffer,
        settlement: Settlement,
        status: TrainerStatus,
        waiter: Waiter,
    ) -> None:
        self._plan, self._queue, self._epoch, self._buffer = plan, queue, epoch, buffer
        self._settlement, self._status, self._waiter = settlement, status, waiter
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Read until a stop. Raises Fenced."""
        while not self._status.stopping:
            with suppress(Unavailable):  # raised only after a stop, which ends the loop
                await (self._await_room() if self._has_enough() else self._receive())

    def groups_taken(self) -> None:
        """Wake the reader: the buffer may have room again."""
        self._room.set()

    def _has_enough(self) -> bool:
        """True if the buffer can make a step and holds as many groups as may be in flight.

        While a ticket of the next step is missing, the reader goes on.
        """
        plan = self._plan
        return self._status.phase in ("done", "refused") or (
            self._buffer.n_waiting >= plan.enough and self._buffer.has(plan.groups_per_step)
        )

    async def _receive(self) -> None:
        count = max(1, min(_READ_COUNT, self._plan.enough - self._buffer.n_waiting))
        entries = await self._waiter.call_queue(lambda: self._queue.read(self._epoch, _CONSUMER, count, _READ_BLOCK_MS))
        if not entries:
            await self._settlement.check_queue()
        began = time.time()
        async with self._settlement.exclusive:
            await self._settlement.drop(await self._buffer.receive(entries))
        for entry in entries:
            tracing.record("read", tracing.of_ticket(entry.ticket), began)
        self._status.waiting_groups = self._buffer.n_waiting
        self._status.changed.set()

    async def _await_room(self) -> None:
        self._room.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ATTEND_S):
                await self._room.wait()
        await self._settlement.check_queue()
