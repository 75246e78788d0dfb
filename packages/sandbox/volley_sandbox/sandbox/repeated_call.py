"""Calls that take longer than one request: the client repeats its request until the answer is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

from shared.errors import Busy, VolleyError

WAIT_S = 20.0
"""Longest wait for an answer in one request."""


async def wait_for_answer[T](future: asyncio.Future[T]) -> T:
    """Wait for an answer. Raises its error, and Busy after WAIT_S: the call continues; repeat the request."""
    try:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.shield(future)
    except TimeoutError:
        raise Busy("the sandbox has not finished the call", "repeat the request", 0.1) from None


class RepeatedCall[T]:
    """Sends a call once, however often its caller repeats it, until the caller has its answer."""

    def __init__(self) -> None:
        self._pending: asyncio.Future[T] | None = None

    async def answer(self, send: Callable[[], asyncio.Future[T]]) -> T:
        """Send the call unless it is pending, and wait for the answer. Raises as `wait_for_answer`.

        After Busy, or if the caller is cancelled, the call stays pending, even if its answer is there by then.
        """
        if self._pending is None:
            self._pending = send()
        try:
            found = await wait_for_answer(self._pending)
        except Busy:
            raise
        except VolleyError:
            self._pending = None
            raise
        self._pending = None
        return found


class OutlivingCalls:
    """Calls that continue without their request; an async context manager that cancels them at its end."""

    def __init__(self) -> None:
        self._tasks, self._running = asyncio.TaskGroup(), set[asyncio.Task[None]]()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        for task in self._running:
            task.cancel()
        await self._tasks.__aexit__(*exception)

    def begin[T](self, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start a call; return its result to come, or its VolleyError."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        task = self._tasks.create_task(_deliver(call, future))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return future


async def _deliver[T](call: Coroutine[Any, Any, T], future: asyncio.Future[T]) -> None:
    try:
        result = await call
    except VolleyError as error:
        future.set_exception(error)
    except BaseException:
        future.cancel()
        raise
    else:
        future.set_result(result)
