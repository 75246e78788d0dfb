"""Lock for weight updates: one at a time, few waiting, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.errors import Unavailable

STAGE_S = 600.0
WAIT_S = 300.0
MAX_WAITING = 8


class UpdateLock:
    """Lock with a bounded number of waiters and bounded times."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._n_waiting = 0

    @asynccontextmanager
    async def for_update(self) -> AsyncIterator[None]:
        """Hold the lock. Raises Unavailable if too many updates wait, or if waiting or the block times out."""
        if self._n_waiting >= MAX_WAITING:
            raise Unavailable(f"{self._n_waiting} weight updates are already waiting")
        self._n_waiting += 1
        try:
            async with _within(WAIT_S, "the weight update waited for other updates and did not start"):
                await self._lock.acquire()
            try:
                async with _within(STAGE_S, "the weight update did not end"):
                    yield
            finally:
                self._lock.release()
        finally:
            self._n_waiting -= 1

    @asynccontextmanager
    async def for_check(self) -> AsyncIterator[None]:
        """Hold the lock briefly between two updates; waits without a deadline and does not count as an update."""
        async with self._lock:
            yield


@asynccontextmanager
async def _within(seconds: float, otherwise: str) -> AsyncIterator[None]:
    """Bound the block's duration. Raises Unavailable."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unavailable(f"{otherwise} within {seconds:g} s") from error
