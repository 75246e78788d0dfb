"""Long calls take turns, so that short ones do not wait behind them.

A call into a sandbox that is not answered after LONG_S most likely computes, and may do so for ever. As many of those
as there are places run at once; the others are paused, and have the places in turn. Turns go round the owners first
(environments, mostly), and then round the sandboxes of each: who has many long calls gets no more than who has one.

Invariants: who waits is paused, who has a place or has left is not; while one waits, every place is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from pathlib import Path
from typing import Protocol

from shared.process import telemetry

LONG_S = 0.1
TURN_S = 0.1
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_PAUSED = telemetry.Gauge(
    "volley_env_sandboxes_paused", "Sandboxes whose long calls wait for their turn", registry=telemetry.REGISTRY
)


class TurnTaker(Protocol):
    """What takes turns. `owner`: who shares one place in the round."""

    @property
    def owner(self) -> str: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Turns[T: TurnTaker]:
    """Args: n_places: how many run at once; by default one for each processor but the last, and at least one."""

    def __init__(self, n_places: int | None = None) -> None:
        self._n_places = n_places or max(1, n_processors() - 1)
        self._running: deque[T] = deque()
        self._waiting: dict[str, deque[T]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def join(self, one: T) -> None:
        """Its call has become long."""
        if len(self._running) < self._n_places:
            self._running.append(one)
        else:
            self._wait(one)
        self._wind()

    def leave(self, one: T) -> None:
        """Its call has ended. One that has not joined is left alone."""
        if one in self._running:
            self._running.remove(one)
            self._fill()
        elif one in (line := self._waiting.get(one.owner, deque())):
            line.remove(one)
            if not line:
                del self._waiting[one.owner]
            one.resume()
            self._tell()

    def rotate(self) -> None:
        """The turns of those that run are over, as far as others wait."""
        self._timer = None
        for _ in range(min(len(self._running), sum(map(len, self._waiting.values())))):
            self._wait(self._running.popleft())
            self._fill()
        self._wind()

    def _wait(self, one: T) -> None:
        one.pause()
        self._waiting.setdefault(one.owner, deque()).append(one)
        self._tell()

    def _fill(self) -> None:
        """Gives free places away. The owner whose turn it was goes to the end of the line."""
        while self._waiting and len(self._running) < self._n_places:
            owner, line = next(iter(self._waiting.items()))
            one = line.popleft()
            del self._waiting[owner]
            if line:
                self._waiting[owner] = line
            self._running.append(one)
            one.resume()
        self._tell()

    def _tell(self) -> None:
        _PAUSED.set(sum(map(len, self._waiting.values())))

    def _wind(self) -> None:
        """A timer runs while somebody waits; who comes meanwhile does not begin it anew."""
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TURN_S, self.rotate)


def n_processors() -> int:
    """That this process may use: those it may run on, and as many as the quota of its container is worth."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # "max" is no quota
        quota, period = map(int, _QUOTA.read_text(encoding="utf-8").split())
        n = min(n, max(1, quota // period))
    return n
