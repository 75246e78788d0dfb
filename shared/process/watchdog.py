"""Watch the event loop: measure how late it runs, and log where it is blocked.

A timer on the loop fires four times a second; its lateness is the metric. A thread counts consecutive checks without a
new beat, and after a second logs the loop's stack. Time in which the whole process was stopped (SIGSTOP, a sleeping
machine) is not counted. A call that holds the interpreter lock hides its stack, but not its lateness.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from shared.process import telemetry

BEAT_S = 0.25
BLOCKED_BEATS = 4
"""Number of missed beats after which the loop counts as blocked: a second."""
_QUIET_S = 30.0
_FRAMES = 16
_LAG = telemetry.Histogram(
    "volley_event_loop_lag_seconds",
    "How late the event loop ran a timer",
    buckets=(0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=telemetry.REGISTRY,
)
_log = telemetry.Log("watchdog")


@contextmanager
def watching() -> Iterator[None]:
    """Watch the running loop within the context; warn at most once in `_QUIET_S` seconds."""
    watch = _Watch(asyncio.get_running_loop())
    thread = threading.Thread(target=watch.observe, name="loop-watch", daemon=True)
    watch.beat(None)
    thread.start()
    try:
        yield
    finally:
        watch.end()
        thread.join()


class _Watch:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._beats = 0
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def beat(self, due: float | None) -> None:
        """Record a beat, on the loop; `due` is the time it was scheduled for, by the loop's clock."""
        now = self._loop.time()
        if due is not None:
            _LAG.observe(max(0.0, now - due))
        self._beats += 1
        self._timer = self._loop.call_at(now + BEAT_S, self.beat, now + BEAT_S)

    def end(self) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def observe(self) -> None:
        """Check for beats in a thread until `end`."""
        seen, missed, quiet_until = -1, 0, 0.0
        while not self._ended.wait(BEAT_S):
            seen, missed = self._beats, missed + 1 if self._beats == seen else 0
            if missed == BLOCKED_BEATS and time.monotonic() >= quiet_until:
                quiet_until = time.monotonic() + _QUIET_S
                _log.warning("event loop blocked", at_least_s=BLOCKED_BEATS * BEAT_S, stack=self._stack())

    def _stack(self) -> list[str]:
        """Return the stack of the loop's thread, the innermost frame last."""
        frame = sys._current_frames().get(self._thread)
        summary = (
            traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_FRAMES, lookup_lines=False)
            if frame
            else []
        )
        return [f"{line.filename}:{line.lineno} {line.name}" for line in reversed(summary)]
