"""Bounds on the work of a proof, in proportion to the bytes that lie in the folder."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from services.cli.runs.survey import Survey
from shared.errors import DecodeError

UNPACKED_FACTOR = 64
"""Groups repeat their prompt for each sample; tokens and numbers hardly pack at all."""
UNPACKED_BYTES = 2**28
_CPU_S = 20.0
_RATES = {"records": 2e6, "archives": 5e6, "others": 5e7}
"""Bytes a CPU second that even a slow machine proves."""


class OutOfTime(BaseException):
    """The proof took more CPU time than a run of this size needs. No part of the proof takes it for its own error."""


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


def allowed_s(found: Survey) -> float:
    """CPU seconds that the proof of a folder may take."""
    return _CPU_S + sum(getattr(found, name) / rate for name, rate in _RATES.items())


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raises OutOfTime after so many seconds of CPU time. Only the main thread can be stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # again, where a destructor has swallowed the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
