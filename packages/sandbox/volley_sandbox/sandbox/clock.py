"""Time limits that hold on a busy machine, for programs that a model writes.

A limit in wall-clock time punishes a right program on a busy machine; one in CPU time lets a sleeping program go on.
So a second counts by the share of a processor that a short loop gets in this service at that time.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from shared.errors import SandboxLost

LOOK_S = 1.0
SLOWEST = 20.0
"""A program that has not used up its limit after this many times as long is given up."""
_TURNS = 100_000
"""Turns of a loop of about 20 ms."""


class ProcessorShare:
    """Share of a processor that a thread gets now, above 0 and at most 1; called in threads.

    All programs use the same measurement for `valid_s`: one for each of them would itself keep processors busy.
    """

    def __init__(self, measure: Callable[[], float], valid_s: float = LOOK_S / 2) -> None:
        self._measure, self._valid_s, self._lock = measure, valid_s, threading.Lock()
        self._share, self._until = 1.0, -math.inf

    def __call__(self) -> float:
        with self._lock:
            if time.monotonic() > self._until:
                self._share = self._measure()
                self._until = time.monotonic() + self._valid_s
            return self._share


def measured_share() -> float:
    """Measure the share with a loop.

    The loop is longer than a slice of the scheduler, because a thread that wakes up gets its first slice at once. It
    does not hold the interpreter's lock.
    """
    began, cpu_began = time.perf_counter(), time.thread_time()
    hashlib.pbkdf2_hmac("sha256", b"", b"", _TURNS)
    cpu_s, wall_s = time.thread_time() - cpu_began, time.perf_counter() - began
    return min(1.0, max(cpu_s, 1e-6) / max(wall_s, 1e-6))


processor_share = ProcessorShare(measured_share)


async def limited[T](
    call: Coroutine[Any, Any, T],
    limit_s: float,
    most_s: float | None = None,
    share_now: Callable[[], float] = processor_share,
) -> tuple[T, float]:
    """Wait for a call; return its result, and the seconds that count.

    Args:
        most_s: seconds of wall-clock time after which the call is given up, by default SLOWEST times the limit.
        share_now: measures the share of a processor that a program gets, in a thread.

    Raises TimeoutError (it has used up `limit_s`, or half of it by `most_s`), SandboxLost (the machine was too busy).
    """
    most_s = SLOWEST * limit_s if most_s is None else most_s
    began, used_s = time.monotonic(), 0.0
    running = asyncio.ensure_future(call)
    try:
        while True:
            before = time.monotonic()
            left_s = min(LOOK_S, limit_s - used_s, began + most_s - before)
            done, _ = await asyncio.wait([running], timeout=max(0.0, left_s))
            if done:
                return running.result(), used_s + time.monotonic() - before
            share = await asyncio.to_thread(share_now)
            used_s += (time.monotonic() - before) * share
            if used_s >= limit_s or ((late := time.monotonic() >= began + most_s) and used_s >= limit_s / 2):
                raise TimeoutError
            if late:
                raise SandboxLost(
                    f"the machine was too busy: a program had a processor for {used_s:.1f} of its {limit_s:g} s",
                    "the episode gives no reward; start fewer programs at once, or use a larger machine",
                    why="time",
                )
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait([running])
