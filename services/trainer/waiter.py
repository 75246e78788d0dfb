"""Blocking calls, and retries while a service is unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial

from services.trainer.status import TrainerStatus
from shared.errors import QueueUnavailable, Unavailable
from shared.process import telemetry

_PAUSE_S, _PAUSE_CAP_S = 0.1, 3.0


_log = telemetry.Log("waiter")


def _forbid_stop_iteration[*A, R](call: Callable[[*A], R], *args: *A) -> R:
    """Turn StopIteration into RuntimeError: a future that raised StopIteration would never complete."""
    try:
        return call(*args)
    except StopIteration as error:
        raise RuntimeError("an iterator ended too early") from error


class Waiter:
    """Runs the train loop's blocking calls, and retries calls until a stop."""

    def __init__(self, executor: Executor, status: TrainerStatus) -> None:
        self._executor, self._status = executor, status

    async def blocking[*A, R](self, call: Callable[[*A], R], *args: *A) -> R:
        """Run a blocking call in the training thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, partial(_forbid_stop_iteration, call, *args)
        )

    async def retry_until_stopped[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry an idempotent call while a service is unavailable or a disk is full. /status shows the wait.

        Raises Unavailable after a stop, and any other error at once.
        """
        pause, status, wait = _PAUSE_S, self._status, object()
        try:
            while True:
                try:
                    return await call()
                except Unavailable as error:
                    if status.stopping:
                        raise
                    status.waits[wait] = status.wait_after(error)
                _log.warning("waiting", reason=status.waits[wait].why, retry_s=pause)
                with suppress(TimeoutError):
                    async with status.until_stop():
                        await asyncio.sleep(pause)
                pause = min(_PAUSE_CAP_S, 2 * pause)
        finally:
            status.waits.pop(wait, None)

    async def call_queue[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry a call of the queue; a queue that does not answer delays a stop by at most a second."""
        return await self.retry_until_stopped(lambda: self.call_queue_once(call))

    async def call_queue_once[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the queue without retries. Raises QueueUnavailable if it has not answered a second after a stop."""
        try:
            async with self._status.until_stop():
                return await call()
        except TimeoutError as error:
            raise QueueUnavailable("Redis did not answer before the stop") from error
