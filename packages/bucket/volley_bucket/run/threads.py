"""Thread for calls that block while a bucket does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress


async def in_thread[T](call: Callable[[], T]) -> T:
    """Run a call in a daemon thread; cancellation abandons the thread."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(value)  # type: ignore[arg-type]
        else:
            answer.set_exception(error)

    def work() -> None:
        try:
            settled = call(), None
        except Exception as error:  # noqa: BLE001 - raised in the caller
            settled = None, error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *settled)

    threading.Thread(target=work, name="bucket", daemon=True).start()
    return await answer
