"""End a command's work at a signal, after its cleanup."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress


class Stopped(Exception):
    """A signal stopped the command."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@asynccontextmanager
async def stopping_on_signal(
    first: Callable[[str], None] = lambda name: None, again: Callable[[], None] = lambda: None
) -> AsyncIterator[None]:
    """Cancel the body at SIGINT, SIGTERM or SIGHUP. A SIGHUP that the parent ignores stays ignored.

    Args:
        first: called with the name of the first signal.
        again: called for each further signal.

    Raises Stopped.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    received: list[int] = []
    assert task is not None

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
            with suppress(OSError):  # the terminal or the pipe's reader may be gone
                first(signal.Signals(number).name)
        else:
            again()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` leaves it
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    except asyncio.CancelledError:
        if not received:
            raise
        task.uncancel()
        raise Stopped(received[0]) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
