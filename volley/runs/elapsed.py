"""How long a run has been worked on. The time is written down while it passes, so that a supervisor that is killed, or
whose machine loses its power, forgets no more than the last seconds; the time in which nobody works does not count.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from shared.errors import VolleyError
from shared.run.folder import RunFolder
from volley.runs.record import RunRecord, write_record

_BEAT_S = 2.0


class ElapsedTime:
    """The run's record, with the seconds that have passed since this was made."""

    def __init__(self, record: RunRecord) -> None:
        self._record, self._started = record, time.monotonic()

    def record(self) -> RunRecord:
        return dataclasses.replace(self._record, elapsed_s=self._record.elapsed_s + time.monotonic() - self._started)


@contextmanager
def counting(folder: RunFolder, record: RunRecord) -> Iterator[ElapsedTime]:
    """Inside, run.json is a few seconds old at most, while it can be written; at the end it is exact.

    Raises StorageUnavailable at the end, unless something else is raised inside.
    """
    worked, ended = ElapsedTime(record), threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_S):
            with suppress(VolleyError, OSError):  # the next beat tells of this one's time too
                write_record(folder, worked.record())

    thread = threading.Thread(target=beat, name="worked", daemon=True)
    thread.start()
    quiet = suppress(VolleyError, OSError)
    try:
        yield worked
        quiet = nullcontext()
    finally:
        ended.set()
        thread.join()
        with quiet:
            write_record(folder, worked.record())
