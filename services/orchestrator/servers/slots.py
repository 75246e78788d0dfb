"""Slots of running episodes: how many run at once, and which wait.

`limit` may change at any time: above it, nothing new starts, and nothing is stopped. While evaluation episodes wait,
training episodes get at most the rest of their share; slots that nobody else wants go to either.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

type Purpose = Literal["train", "eval"]


class Slots:
    """Slots of all episodes.

    Args:
        limit: number of episodes at once.
        eval_share: share of the slots that evaluations may take from training; None for first come, first served.
    """

    def __init__(self, limit: int, eval_share: float | None = None) -> None:
        self._limit, self._eval_share = limit, eval_share
        self._running: dict[Purpose, int] = {"train": 0, "eval": 0}
        self._waiting: dict[Purpose, deque[tuple[int, asyncio.Future[None]]]] = {"train": deque(), "eval": deque()}
        self._n_asked = 0

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._start()

    @property
    def n_running(self) -> int:
        return sum(self._running.values())

    @property
    def n_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def taken(self, purpose: Purpose) -> AsyncIterator[None]:
        """Wait for a slot, and hold it within the context."""
        self._n_asked += 1
        place = self._n_asked, asyncio.get_running_loop().create_future()
        waiting = self._waiting[purpose]
        waiting.append(place)
        self._start()
        try:
            await place[1]
        except asyncio.CancelledError:
            if not place[1].cancelled():  # it was given a slot in the same moment
                self._running[purpose] -= 1
            elif place in waiting:
                waiting.remove(place)
            self._start()
            raise
        try:
            yield
        finally:
            self._running[purpose] -= 1
            self._start()

    def _start(self) -> None:
        while self.n_running < self._limit and (purpose := self._next()) is not None:
            _, slot = self._waiting[purpose].popleft()
            if not slot.done():
                self._running[purpose] += 1
                slot.set_result(None)

    def _next(self) -> Purpose | None:
        """Purpose of the episode to start next."""
        first: list[tuple[int, Purpose]] = [
            (places[0][0], purpose) for purpose, places in self._waiting.items() if places
        ]
        if not first:
            return None
        if self._eval_share is None or len(first) == 1:
            return min(first)[1]
        n_eval = max(1, math.ceil(self._eval_share * self._limit))
        return "eval" if self._running["eval"] < n_eval else "train"
