"""One incarnation of the trainer, from an empty process to its end.

Open: restore the newest checkpoint (or warm start a new model), take over the queue under a new epoch, and make and publish
the first checkpoint of that epoch. Then the course. A stop lets the running step end, saves what is not durable, and returns.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from services.trainer.board import Board
from services.trainer.course import Course
from services.trainer.parts import Parts, Plan, Waiter
from shared import telemetry
from shared.errors import Unavailable, VolleyError
from shared.state import TrainerState, fresh

_log = telemetry.Log("loop")


class Loop:
    """The service's worker."""

    def __init__(self, plan: Plan, parts: Parts, board: Board) -> None:
        self._plan, self._parts, self._board = plan, parts, board
        self._waiter = Waiter(parts.executor, board)

    async def run(self) -> None:
        """Returns when the last step is durable and published.

        Raises:
            Fenced: a newer trainer has taken over.
            VolleyError: what else ends a run: a model or a checkpoint that cannot be loaded.
        """
        try:
            async with asyncio.TaskGroup() as group:
                work = group.create_task(self._work(group))
                try:
                    await asyncio.shield(work)
                except asyncio.CancelledError:
                    await self._wind_down(work)
                    raise
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def _wind_down(self, work: asyncio.Task[None]) -> None:
        """Waits for the running step and its checkpoint. The grace alone ends it: cancellations that follow the first do not."""
        self._board.stop()
        loop = asyncio.get_running_loop()
        end = loop.time() + self._plan.grace_s
        while not work.done() and loop.time() < end:
            with suppress(asyncio.CancelledError):
                await asyncio.wait({work}, timeout=end - loop.time())
        if not work.done():
            _log.warning("stopped without a checkpoint", step=self._board.step, durable_step=self._board.durable_step)

    async def _work(self, group: asyncio.TaskGroup) -> None:
        try:
            await self._life(group)
        except* Unavailable as errors:
            if not self._board.stopping:
                raise
            _log.warning("stopped while waiting", reason=str(_first(errors)))

    async def _life(self, group: asyncio.TaskGroup) -> None:
        board, parts = self._board, self._parts
        found = await self._waiter.blocking(parts.backend.restore)
        state = await asyncio.to_thread(parts.ledger.reconcile, found or fresh(self._plan.seed))
        await self._waiter.blocking(parts.backend.build)
        if found is None:
            await self._warm_start()
        if board.stopping:
            return
        state = await self._take_over(state)
        for log in (parts.metrics, parts.handovers):  # not before: until here an older trainer may still write to them
            await asyncio.to_thread(log.truncate_beyond, state.step if found else -1)
        folder = await self._waiter.blocking(parts.backend.start, state)
        board.step, board.epoch, board.version = state.step, state.epoch, str(state.version)
        board.durable(state.step)
        _log.info("started", run=board.run, version=board.version, resumed=found is not None)
        course = Course(self._plan, parts, board, state, group)
        group.create_task(course.publish(folder, {}))
        await course.follow()
        board.phase = "stopped" if board.stopping else "done"

    async def _warm_start(self) -> None:
        self._board.phase = "warm start"
        await self._parts.warm_start()

    async def _take_over(self, state: TrainerState) -> TrainerState:
        self._board.phase = "starting"
        queue = self._parts.queue
        epoch = await self._waiter.patiently(lambda: queue.begin(state.low, state.step, state.issued, state.void, state.done, state.epoch))
        return state.under(epoch, keep_reference=self._plan.keep_reference)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to report: the first of the project's own if there is any."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in leaves if isinstance(error, VolleyError)), leaves[0])
