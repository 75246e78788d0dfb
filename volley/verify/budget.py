"""Bounds on the work of a proof, in proportion to the bytes that lie in the folder."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from shared.errors import DecodeError
from volley.runs.survey import Survey

UNPACKED_FACTOR = 64
"""Groups repeat their prompt for each sample; tokens and numbers hardly pack at all."""
UNPACKED_BYTES = 2**28
_CPU_S, _WALL_S, _WALL_FACTOR = 20.0, 28.0, 3.0
_RATES = {"records": 2e6, "archives": 5e6, "others": 5e7}
"""Bytes a CPU second that even a slow machine proves."""


class OutOfTime(BaseException):
    """The proof took more CPU time than a run of this size needs. No part of the proof takes it for its own error."""


class NotFinished(BaseException):
    """The proof did not end in its time on the clock, within its CPU time: the machine is busy, or its disk slow."""


class UnpackingBudget:
    """How much the archives of a folder may unpack to, all together."""

    def __init__(self, packed_bytes: int) -> None:
        self._most = self._left = UNPACKED_BYTES + UNPACKED_FACTOR * packed_bytes

    def spend(self, n_bytes: int) -> None:
        """Raises DecodeError where the budget is used up."""
        self._left -= n_bytes
        if self._left < 0:
            most = f"{self._most >> 20} MiB, {UNPACKED_FACTOR} times what lies on the disk"
            raise DecodeError(f"the archives unpack to more than {most}")


def unbounded(n_bytes: int) -> None:
    """No bounds, for a folder that its user trusts."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Seconds that the proof of a folder may take."""

    cpu_s: float
    wall_s: float


SURVEY = Allowance(_CPU_S, _WALL_S)
"""For the look at kinds and sizes of its files, before it is known how much there is to read."""


def allowed(found: Survey, surveyed_s: float) -> Allowance:
    """More for each byte that lies in the folder, less what the survey took on the clock."""
    read_s = sum(getattr(found, name) / rate for name, rate in _RATES.items())
    return Allowance(_CPU_S + read_s, max(1.0, _WALL_S + _WALL_FACTOR * read_s - surveyed_s))


@contextmanager
def bounded(allowance: Allowance) -> Iterator[None]:
    """Raises OutOfTime or NotFinished beyond the allowance. Only the main thread can be stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    cpu_s, wall_s = allowance.cpu_s, allowance.wall_s
    too_much = OutOfTime(
        f"the proof takes more than {cpu_s:.0f} s of CPU time, far more than that of a run of this size"
    )
    too_late = NotFinished(f"the proof did not end within {wall_s:.0f} s: run it again when the machine is less busy")
    with (
        _alarm(signal.SIGPROF, signal.ITIMER_PROF, cpu_s, too_much),
        _alarm(signal.SIGALRM, signal.ITIMER_REAL, wall_s, too_late),
    ):
        yield


@contextmanager
def _alarm(number: signal.Signals, timer: int, seconds: float, error: BaseException) -> Iterator[None]:
    """Raise `error` when the timer has run for so many seconds; a timer that runs already goes on afterwards."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise error

    began, before = time.monotonic(), signal.signal(number, stop)
    left, every = signal.setitimer(timer, seconds, 1.0)  # again, where a destructor has swallowed the first
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
        if left:
            signal.setitimer(timer, max(0.001, left - (time.monotonic() - began)), every)
