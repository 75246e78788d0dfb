"""Run work of a size that a client decides: small work on the event loop, large work in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LARGE = 32 * 1024
"""Size in bytes above which decoding takes longer than a round trip to a thread."""

_THREADS = ThreadPoolExecutor(2, thread_name_prefix="decode")


async def by_size[T](n_bytes: int, work: Callable[[], T]) -> T:
    """Run `work()`, which limits itself: at once for up to LARGE bytes, else in one of two threads."""
    if n_bytes <= LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
