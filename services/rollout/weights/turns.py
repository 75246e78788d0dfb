"""Queue of weight updates: one at a time, few waiting, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.errors import Unavailable

STAGE_S = 600.0
WAIT_S = 300.0
MAX_WAITING = 8


class UpdateTurns:
    """Lock with a bounded number of waiters and bounded times."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._n_waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Raises Unavailable if too many wait, the turn does not come, or its block does not end in time."""
        if self._n_waiting >= MAX_WAITING:
            raise Unavailable(f"{self._n_waiting} weight updates wait already")
        self._n_waiting += 1
        try:
            async with _within(WAIT_S, "the weight update did not get its turn"):
                await self._lock.acquire()
            try:
                async with _within(STAGE_S, "the weight update did not end"):
                    yield
            finally:
                self._lock.release()
        finally:
            self._n_waiting -= 1

    @asynccontextmanager
    async def between(self) -> AsyncIterator[None]:
        """Hold the lock briefly between two updates; it waits without limit, and counts against no limit."""
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
