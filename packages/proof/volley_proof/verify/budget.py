"""Bounds on the work of a proof, in proportion to the folder's bytes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from shared.errors import DecodeError
from volley_python.folder.survey import Survey

UNPACKED_FACTOR = 64
"""Bound on compression: groups repeat their prompt for each sample, other tokens and numbers hardly compress."""
UNPACKED_BYTES = 2**28
_CPU_S, _WALL_S, _WALL_FACTOR = 20.0, 28.0, 3.0
_RATES = {"records": 2e6, "archives": 5e6, "others": 5e7}
"""Bytes per CPU second that even a slow machine verifies."""


class OutOfTime(BaseException):
    """The proof took more CPU time than a run of this size needs. A BaseException, so no check catches it."""


class NotFinished(BaseException):
    """The proof exceeded its wall time but not its CPU time, on a busy machine or slow disk."""


class UnpackingBudget:
    """Bytes that all archives of a folder may unpack to."""

    def __init__(self, packed_bytes: int) -> None:
        self._most = self._left = UNPACKED_BYTES + UNPACKED_FACTOR * packed_bytes

    def spend(self, n_bytes: int) -> None:
        """Raises DecodeError if the budget is used up."""
        self._left -= n_bytes
        if self._left < 0:
            most = f"{self._most >> 20} MiB, {UNPACKED_FACTOR} times their size on the disk"
            raise DecodeError(f"the archives unpack to more than {most}")


def unbounded(n_bytes: int) -> None:
    """No bounds, for a trusted folder."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Seconds that the proof of a folder may take."""

    cpu_s: float
    wall_s: float


SURVEY = Allowance(_CPU_S, _WALL_S)
"""For the survey of file types and sizes, before the amount to read is known."""


def allowed(found: Survey, surveyed_s: float) -> Allowance:
    """Allowance for the folder's bytes, less the wall time that the survey took."""
    read_s = sum(getattr(found, name) / rate for name, rate in _RATES.items())
    return Allowance(_CPU_S + read_s, max(1.0, _WALL_S + _WALL_FACTOR * read_s - surveyed_s))


@contextmanager
def bounded(allowance: Allowance) -> Iterator[None]:
    """Raises OutOfTime or NotFinished beyond the allowance. Works only in the main thread."""
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
    """Raise `error` after so many seconds of the timer; an earlier timer continues afterwards."""

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
