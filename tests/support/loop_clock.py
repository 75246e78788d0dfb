"""Move the clock of a running event loop: a long deadline then passes at once, beside real threads and sockets."""

from __future__ import annotations

import asyncio


def skip(seconds: float) -> None:
    """Let `seconds` pass for the timers of the running event loop, those of the test included."""
    loop = asyncio.get_running_loop()
    real = type(loop).time
    ahead = loop.time() - real(loop) + seconds
    loop.time = lambda: real(loop) + ahead  # type: ignore[method-assign]
