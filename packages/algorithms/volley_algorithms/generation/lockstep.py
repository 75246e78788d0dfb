"""Episodes that advance turn by turn together."""

from __future__ import annotations

import asyncio


class EpisodeBarrier:
    """`TurnBarrier` of `n_episodes`, which holds each until all that still run have reached their next turn.

    An episode that ends is no longer waited for. One that repeats a failed attempt also waits before each repeated
    turn.
    """

    def __init__(self, n_episodes: int) -> None:
        self._running, self._arrived = n_episodes, 0
        self._go = asyncio.Event()

    async def turn(self) -> None:
        """Wait for the others."""
        go, self._arrived = self._go, self._arrived + 1
        self._release()
        try:
            await go.wait()
        except asyncio.CancelledError:
            if not go.is_set():
                self._arrived -= 1
            raise

    def leave(self) -> None:
        """Remove an episode that has ended."""
        self._running -= 1
        self._release()

    def _release(self) -> None:
        if self._arrived and self._arrived >= self._running:
            self._arrived = 0
            self._go.set()
            self._go = asyncio.Event()
