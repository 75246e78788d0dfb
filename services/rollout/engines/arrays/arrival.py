"""Place weights on the devices while some of their chunks are still being pulled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import Conflict

_LOOK_S = 0.005


class Arrival:
    """Chunks that a loading thread waits for. `completed_at` is the `time.perf_counter` at which the last one arrived.

    Args:
        check_wanted: raises an error to end the loading.
        is_complete: whether no more chunks will come.
    """

    def __init__(self, check_wanted: Callable[[], None], *, is_complete: bool) -> None:
        self._check_wanted, self._has_failed = check_wanted, False
        self._complete, self.completed_at = threading.Event(), 0.0
        if is_complete:
            self.complete()

    def check(self) -> None:
        """Raise the error that ends the loading, if there is one."""
        if self._has_failed:
            raise Conflict("loading the weights has failed in another thread")
        self._check_wanted()

    @contextmanager
    def ended_by_failure(self) -> Iterator[None]:
        """End other threads' waits if the block fails."""
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise

    @property
    def is_complete(self) -> bool:
        return self._complete.is_set()

    def complete(self) -> None:
        """End all waits: no more chunks will come."""
        self.completed_at = time.perf_counter()
        self._complete.set()

    def seconds_since(self, start: float) -> float:
        """Return the seconds since `start`, or since the last chunk arrived if that was later; 0 until then."""
        return time.perf_counter() - max(start, self.completed_at) if self.is_complete else 0.0

    def wait_for(self, chunk: Path) -> None:
        """Wait until the chunk's file is there, or no more chunks will come."""
        self.check()
        while not (self._complete.wait(0) or chunk.is_file()):
            self._complete.wait(_LOOK_S)
            self.check()
