"""Schedule long calls, so that short calls do not wait behind them.

A call that is not answered after LONG_S most likely computes, perhaps for ever. A fixed number of such calls, the
places, run at once; the others are paused and get the places in turn. Turns rotate over the owners (mostly
environments) first, and then over the sandboxes of each owner, so an owner with many long calls gets no more than one
with a single call.

Invariants: a waiting sandbox is paused; one with a place, or without a long call, is not; while one waits, every place
is taken.
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
    """A sandbox that takes turns. Sandboxes of one `owner` share one position in the rotation."""

    @property
    def owner(self) -> str: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Turns[T: TurnTaker]:
    """Rotation of long calls.

    Args:
        n_places: long calls that run at once; by default the number of processors minus one, and at least one.
    """

    def __init__(self, n_places: int | None = None) -> None:
        self._n_places = n_places or max(1, n_processors() - 1)
        self._running: deque[T] = deque()
        self._waiting: dict[str, deque[T]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def join(self, one: T) -> None:
        """Enter a sandbox whose call has become long."""
        if len(self._running) < self._n_places:
            self._running.append(one)
        else:
            self._wait(one)
        self._start_timer()

    def leave(self, one: T) -> None:
        """Remove a sandbox whose call has ended. Has no effect on one that has not joined."""
        if one in self._running:
            self._running.remove(one)
            self._fill()
        elif one in (line := self._waiting.get(one.owner, deque())):
            line.remove(one)
            if not line:
                del self._waiting[one.owner]
            one.resume()
            self._update_metric()

    def rotate(self) -> None:
        """End the turns of running sandboxes, as far as others wait."""
        self._timer = None
        for _ in range(min(len(self._running), sum(map(len, self._waiting.values())))):
            self._wait(self._running.popleft())
            self._fill()
        self._start_timer()

    def _wait(self, one: T) -> None:
        one.pause()
        self._waiting.setdefault(one.owner, deque()).append(one)
        self._update_metric()

    def _fill(self) -> None:
        """Give free places to waiting owners. An owner that gets one goes to the end of the queue."""
        while self._waiting and len(self._running) < self._n_places:
            owner, line = next(iter(self._waiting.items()))
            one = line.popleft()
            del self._waiting[owner]
            if line:
                self._waiting[owner] = line
            self._running.append(one)
            one.resume()
        self._update_metric()

    def _update_metric(self) -> None:
        _PAUSED.set(sum(map(len, self._waiting.values())))

    def _start_timer(self) -> None:
        """Start the timer if a sandbox waits. A later arrival does not restart it."""
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TURN_S, self.rotate)


def n_processors() -> int:
    """Number of usable processors, by affinity and container quota."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # "max" means no quota
        quota, period = map(int, _QUOTA.read_text(encoding="utf-8").split())
        n = min(n, max(1, quota // period))
    return n
