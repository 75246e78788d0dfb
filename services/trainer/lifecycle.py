"""Life cycle of a trainer's work, for RL and for supervised training.

A stop lets the running step end and save, within the grace period. A non-finite step, or a rule of the user that fails,
stops training; the process keeps serving status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.trainer.status import TrainerStatus
from shared.errors import NonFinite, RuleFailed, Unavailable, first_error
from shared.own_rules import MENDING
from shared.process import telemetry

type Work = Callable[[asyncio.TaskGroup], Awaitable[None]]
type Leave = Callable[[], Awaitable[None]]
_log = telemetry.Log("worker")


async def run(work: Work, status: TrainerStatus, grace_s: float, leave: Leave) -> None:
    """Run `work` until this task is cancelled, then wait for its stop.

    Args:
        work: returns when the status asks to stop.
        leave: tells the other services that the stop is not a crash; may be called more than once.

    Raises:
        VolleyError: any other error that ends a run.
    """
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_guarded(work, group, status, leave))
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                await _wind_down(task, status, grace_s, leave)
                raise
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def _wind_down(task: asyncio.Task[None], status: TrainerStatus, grace_s: float, leave: Leave) -> None:
    """Wait for the running step and its checkpoint, at most `grace_s` seconds."""
    status.stop()
    await asyncio.wait({task}, timeout=grace_s)
    if not task.done():
        _log.warning("the grace is over", phase=status.phase, step=status.step, durable_step=status.durable_step)
        await leave()


async def _guarded(work: Work, group: asyncio.TaskGroup, status: TrainerStatus, leave: Leave) -> None:
    try:
        await work(group)
    except* Unavailable as errors:
        if not status.stopping:
            raise
        _log.warning("stopped while waiting", phase=status.phase, reason=str(first_error(errors)))
    except* NonFinite as errors:
        await _stand_by(str(first_error(errors)), status, leave)
    except* RuleFailed as errors:
        await _stand_by(f"{first_error(errors)}; {MENDING}", status, leave)


async def _stand_by(reason: str, status: TrainerStatus, leave: Leave) -> None:
    """Stop training and report the reason until a stop; a restart would meet the same error."""
    _log.error("refused", run=status.run, phase=status.phase, reason=reason)
    status.refused, status.phase = reason, "refused"
    await leave()
    while not status.stopping:
        status.changed.clear()
        await status.changed.wait()
    await leave()  # again: the queue may have been unavailable before
    status.phase = "stopped"
