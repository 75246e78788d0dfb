"""Gate that blocks reservations while there is a reason to keep it closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class ReservationGate:
    """Closed while there is a reason; the first is `START`."""

    START = "start"

    def __init__(self) -> None:
        self._reasons = {self.START}
        self._open = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def wait_open(self) -> None:
        """Wait until the gate is open; only that or cancellation ends it."""
        await self._open.wait()

    def close(self, reason: str) -> None:
        self._reasons.add(reason)
        self._open.clear()

    def release(self, reason: str) -> None:
        self._reasons.discard(reason)
        if not self._reasons:
            self._open.set()

    @contextmanager
    def closed_for(self, reason: str) -> Iterator[None]:
        self.close(reason)
        try:
            yield
        finally:
            self.release(reason)
