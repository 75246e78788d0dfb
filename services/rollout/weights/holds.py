"""Leases that keep the serving version during an evaluation: no other version is committed before they end.

A lease ends when its holder releases it or when it expires, so a dead holder delays an update only by seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shared.errors import Conflict

MAX_S = 60.0
"""Longest lease."""


class VersionHolds:
    """Leases on one version, by holder. Args: clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._version: str | None = None
        self._until: dict[str, float] = {}
        self._changed = asyncio.Event()

    def blocks(self, version: str) -> bool:
        """True if another version is held now."""
        return self._version != version and self._left_s() > 0

    def any(self) -> bool:
        return self._left_s() > 0

    def take(self, holder: str, version: str, seconds: float) -> None:
        """Hold `version` for `seconds` from now; 0 releases it. Raises Conflict while others hold another version."""
        if seconds and self.blocks(version):
            raise Conflict(f"{version} cannot be held: {self._version} is held for another {self._left_s():.1f} s")
        if seconds:
            self._version, self._until[holder] = version, self._clock() + min(seconds, MAX_S)
        else:
            self.release(holder)

    def release(self, holder: str) -> None:
        self._until.pop(holder, None)
        self._changed.set()

    async def passed(self, version: str) -> None:
        """Wait until `version` may be committed."""
        while self.blocks(version):
            self._changed.clear()
            try:
                async with asyncio.timeout(self._left_s()):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _left_s(self) -> float:
        return max((until - self._clock() for until in self._until.values()), default=0.0)
