"""`volley track` as a process beside a run, as `volley train` and `volley follow` start it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shared.run.folder import RunFolder
from volley.local import beside

_WAIT_S = 20.0
"""Time for the trackers to take the rest after the run's end, in seconds."""


@contextmanager
def tracked(folder: RunFolder, trackers: Sequence[str], say: Callable[[str], None]) -> Iterator[None]:
    """Report to the trackers inside the context. A tracker that is away delays nothing, and fails nothing.

    The process sends the rest before it ends, also if this one is killed.
    """
    if not trackers:
        yield
        return
    wanted = [argument for tracker in trackers for argument in ("--to", tracker)]
    log_path = folder.logs / "trackers.log"
    process = beside.start(["track", str(folder.path), "--follow", *wanted], log_path)
    say(f"reporting to {', '.join(trackers)} (log in {log_path})")
    try:
        yield
    finally:
        code = beside.end_input(process, _WAIT_S)
        if code is None:
            say(f"trackers are still sending; if {log_path} shows errors, `volley track {folder.path}` sends the rest")
        elif code:
            say(f"not everything was reported: see {log_path}; `volley track {folder.path}` sends the rest")
