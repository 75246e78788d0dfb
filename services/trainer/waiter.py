"""Waits for blocking calls and for services that are away, for the train loop."""

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


def _called[*A, R](call: Callable[[*A], R], *args: *A) -> R:
    """A future cannot carry StopIteration: who waits for it would wait for ever."""
    try:
        return call(*args)
    except StopIteration as error:
        raise RuntimeError("an iterator ended too early") from error


class Waiter:
    """Waits for what blocks and for what is away, on behalf of the train loop."""

    def __init__(self, executor: Executor, status: TrainerStatus) -> None:
        self._executor, self._status = executor, status

    async def blocking[*A, R](self, call: Callable[[*A], R], *args: *A) -> R:
        """Runs a blocking call in the one training thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(_called, call, *args))

    async def patiently[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats what is safe to repeat while the other side is away or a disk is full; /status says so, and a stop
        ends it.

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

    async def answer[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """`patiently` for the queue: one that does not answer delays a stop by no more than a second."""
        return await self.patiently(lambda: self.hurriedly(call))

    async def hurriedly[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """The queue's answer. Raises QueueUnavailable if a stop does not leave it the time."""
        try:
            async with self._status.until_stop():
                return await call()
        except TimeoutError as error:
            raise QueueUnavailable("Redis did not answer before the stop") from error
