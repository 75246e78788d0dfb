"""Work whose length follows the size of what somebody sent: short work runs on the event loop, long work beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LARGE = 32 * 1024
"""Bytes from which decoding takes longer than handing it to a thread and back."""

_THREADS = ThreadPoolExecutor(2, thread_name_prefix="decode")


async def by_size[T](n_bytes: int, work: Callable[[], T]) -> T:
    """`work()`, which is bounded by itself: at once for up to LARGE bytes, in one of two threads for more."""
    if n_bytes <= LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
