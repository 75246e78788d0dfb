"""Working time of a run, without the pauses between sessions.

It is written every two seconds, so a killed supervisor or a power failure loses only the last seconds.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from shared.errors import VolleyError
from shared.run.folder import RunFolder
from volley.runs.run_file import RunRecord, write_record

_BEAT_S = 2.0


class ElapsedTime:
    """The run's record, with the seconds since this object was made added, and why the run failed, if it did."""

    def __init__(self, record: RunRecord) -> None:
        self._record, self._started = record, time.monotonic()
        self.failed: str | None = None

    def record(self) -> RunRecord:
        elapsed_s = self._record.elapsed_s + time.monotonic() - self._started
        return dataclasses.replace(self._record, elapsed_s=elapsed_s, failed=self.failed)


@contextmanager
def counting(folder: RunFolder, record: RunRecord) -> Iterator[ElapsedTime]:
    """Keep run.json's time a few seconds old at most, and exact at the end of the context.

    Raises StorageUnavailable at the end, unless the body raises.
    """
    worked, ended = ElapsedTime(record), threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_S):
            with suppress(VolleyError, OSError):  # the next beat includes this one's time
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
