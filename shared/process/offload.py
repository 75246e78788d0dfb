"""Run work of a size that a client decides: small work on the event loop, large work in a thread.

Texts are tokenized in threads of their own, so that long ones do not delay the decoding of bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LARGE = 32 * 1024
"""Size in bytes above which decoding takes longer than a round trip to a thread."""

_THREADS = ThreadPoolExecutor(2, thread_name_prefix="decode")
_TOKENIZING = ThreadPoolExecutor(2, thread_name_prefix="tokenize")


async def by_size[T](n_bytes: int, work: Callable[[], T]) -> T:
    """Run `work()`, which limits itself: at once for up to LARGE bytes, else in one of two threads."""
    if n_bytes <= LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


async def tokenizing[T](work: Callable[[], T]) -> T:
    """Run `work()`, which reads and tokenizes a client's text, in one of two threads."""
    return await asyncio.get_running_loop().run_in_executor(_TOKENIZING, work)
