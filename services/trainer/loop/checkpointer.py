"""Checkpoints beside training: the arrays are taken between two steps, and written while the next ones run.

Invariants: one is in the making at a time; what one holds is the state of a step with a durable commit record;
nothing waits for one but the next one, a stop, and the end of the run. A disk that is full delays checkpoints, not
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
from shared.run.wedge import Wait

_log = telemetry.Log("checkpointer")


class Checkpointer:
    """Of one incarnation.

    Args:
        group: where checkpoints are written; it fails with Fenced if another trainer has begun.
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
        """Whether the present weights are to be saved: after so many steps, at the last one, where they are evaluated,
        or because somebody asks for it.
        """
        plan, step = self._plan, self._settlement.pending.version.step
        return step > self._taken and (
            step - self._taken >= plan.save_interval_steps
            or self._status.checkpoint_wanted
            or step == plan.max_steps
            or plan.is_evaluated(step)
        )

    async def begin(self) -> None:
        """Takes the present weights, once the checkpoint before is written. Raises Fenced, and Unavailable if there can
        be none of them.
        """
        await self._finished()
        settlement, backend = self._settlement, self._parts.backend
        state, base = await settlement.savable(), settlement.pending.saved
        write = await self._waiter.blocking(backend.take, state, base)
        self._taken = state.step
        self._writing = self._group.create_task(self._write(write, state))

    async def complete(self) -> None:
        """Waits until the present weights are saved. Raises Unavailable after a stop."""
        self._status.phase = "saving"
        await self._waiter.patiently(self._completed)

    async def _completed(self) -> None:
        error = await self._finished()
        if self._settlement.pending.n_unsaved:
            await self.begin()
            error = await self._finished()
        if error is not None:
            raise error

    async def _finished(self) -> Unavailable | None:
        """Waits for the one in the making; what kept it from being made."""
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
            return _alone(error)
        status.waits.pop(self, None)
        self._settlement.saved(state.version)
        status.saved(state.step)
        status.timed("save", time.perf_counter() - started)
        await asyncio.to_thread(self._forget, state.epoch)
        return None

    def _forget(self, epoch: int) -> None:
        """Commit records before the oldest checkpoint that the run's bucket has as well. Raises Fenced: a newer trainer
        may need what we would remove.
        """
        parts = self._parts
        parts.archive.check_newest(epoch)
        oldest = parts.checkpoints.oldest_step()
        parts.commits.forget(oldest if parts.bucket is None else min(oldest, parts.bucket.needed_step))


def _alone(error: Unavailable) -> Unavailable:
    """Without what it came of: tracebacks have every array that was to be written."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
