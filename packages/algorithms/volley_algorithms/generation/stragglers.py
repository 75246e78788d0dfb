"""Void groups that take much longer than others."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shared.generation_schema import StragglerConfig
from shared.types import Group

_LEAST_REMEMBERED = 64


@dataclass(slots=True)
class _Running:
    started_at: float
    timeout: asyncio.Timeout


class Stragglers:
    """Compares each running group with the groups that ended since it started.

    Once `after_share` of a step's number of groups have ended since, and it has taken `factor` times their median
    duration, it is void. All these groups saw the same outages, so an outage alone voids nothing.
    """

    def __init__(
        self, config: StragglerConfig, groups_per_step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._factor, self._clock = config.factor, clock
        self._least = max(2, math.ceil(config.after_share * groups_per_step))
        self._ended = deque[tuple[float, float]](maxlen=max(_LEAST_REMEMBERED, 4 * groups_per_step))
        self._running = dict[int, _Running]()

    async def run(
        self, ticket: int, generate: Callable[[], Awaitable[Group]], void: Callable[[str], Awaitable[Group]]
    ) -> Group:
        """Return the group, or what `void` makes of the reason if it takes too long."""
        started_at = self._clock()
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._running[ticket] = _Running(started_at, timeout)
                return await generate()
        except TimeoutError:
            if not timeout.expired():
                raise
        finally:
            del self._running[ticket]
            self._record_end(started_at)
        median = statistics.median(self._durations_since(started_at))
        return await void(f"it took {self._clock() - started_at:.1f} s, others {median:.1f} s (median)")

    def _record_end(self, started_at: float) -> None:
        now = self._clock()
        self._ended.append((now, now - started_at))
        loop_now = asyncio.get_running_loop().time()
        for one in self._running.values():
            since = self._durations_since(one.started_at)
            if len(since) >= self._least and not one.timeout.expired():
                left = self._factor * statistics.median(since) - (now - one.started_at)
                one.timeout.reschedule(loop_now + max(0.0, left))

    def _durations_since(self, started_at: float) -> list[float]:
        """Durations of the groups that ended since then."""
        return [duration for ended, duration in self._ended if ended >= started_at]
