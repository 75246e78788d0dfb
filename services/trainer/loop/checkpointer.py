"""Background checkpoints: arrays are copied between two steps and written while the next steps run.

Invariants: at most one checkpoint is being written; a checkpoint holds the state of a step with a durable commit
record; only the next checkpoint, a stop, and the end of the run wait for it. A full disk delays checkpoints, not
training: the log has every step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from services.trainer.interfaces import TrainPlan
from services.trainer.loop.collaborators import Collaborators
from services.trainer.loop.settlement import Settlement
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.errors import Unavailable
from shared.process import telemetry
from shared.run.state import TrainerState
from shared.run.waits import Wait

_log = telemetry.Log("checkpointer")


class Checkpointer:
    """Makes the checkpoints of one incarnation.

    Args:
        group: runs the writes; it fails with Fenced if another trainer has begun.
    """

    def __init__(
        self,
        plan: TrainPlan,
        parts: Collaborators,
        settlement: Settlement,
        status: TrainerStatus,
        waiter: Waiter,
        group: asyncio.TaskGroup,
    ) -> None:
        self._plan, self._parts, self._settlement = plan, parts, settlement
        self._status, self._waiter, self._group = status, waiter, group
        self._writing: asyncio.Task[Unavailable | None] | None = None
        self._taken = settlement.pending.saved.step

    @property
    def is_due(self) -> bool:
        """True if the present weights should be saved: every `save_interval_steps`, at the last step, for an evaluated
        version, or on request.
        """
        plan, step = self._plan, self._settlement.pending.version.step
        return step > self._taken and (
            step - self._taken >= plan.save_interval_steps
            or self._status.checkpoint_wanted
            or step == plan.max_steps
            or plan.is_evaluated(step)
        )

    async def begin(self) -> None:
        """Copy the present weights and start writing them, once the previous checkpoint is written.

        Raises Fenced, and Unavailable if the present weights cannot be saved.
        """
        await self._finished()
        settlement, backend = self._settlement, self._parts.backend
        state, base = await settlement.savable(), settlement.pending.saved
        write = await self._waiter.blocking(backend.take, state, base)
        self._taken = state.step
        self._writing = self._group.create_task(self._write(write, state))

    async def complete(self) -> None:
        """Wait until the present weights are saved. Raises Unavailable after a stop."""
        self._status.phase = "saving"
        await self._waiter.retry_until_stopped(self._completed)

    async def _completed(self) -> None:
        error = await self._finished()
        if self._settlement.pending.n_unsaved:
            await self.begin()
            error = await self._finished()
        if error is not None:
            raise error

    async def _finished(self) -> Unavailable | None:
        """Wait for the checkpoint that is being written; return the error that kept it from being written."""
        writing, self._writing = self._writing, None
        return None if writing is None else await asyncio.shield(writing)

    async def _write(self, write: Callable[[], Path], state: TrainerState) -> Unavailable | None:
        status, started = self._status, time.perf_counter()
        try:
            await asyncio.to_thread(write)
        except Unavailable as error:
            _log.warning("checkpoint put off", version=str(state.version), reason=str(error))
            status.waits[self] = Wait(error.waits_on or "disk", f"checkpoint of step {state.step}: {error}")
            self._taken = self._settlement.pending.saved.step  # due again after the next step
            return _without_traceback(error)
        status.waits.pop(self, None)
        self._settlement.saved(state.version)
        status.saved(state.step)
        status.timed("save", time.perf_counter() - started)
        await asyncio.to_thread(self._forget, state.epoch)
        return None

    def _forget(self, epoch: int) -> None:
        """Remove commit records that precede the oldest checkpoint and that the bucket, if any, has.

        Raises Fenced if another trainer has begun: it may need them.
        """
        parts = self._parts
        parts.archive.check_newest(epoch)
        oldest = parts.checkpoints.oldest_step()
        parts.commits.forget(oldest if parts.bucket is None else min(oldest, parts.bucket.needed_step))


def _without_traceback(error: Unavailable) -> Unavailable:
    """Drop causes and traceback: their frames hold every array that was to be written."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
