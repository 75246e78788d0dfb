"""`volley track` as a process beside a run, as `volley train` and `volley follow` start it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from shared.run.folder import RunFolder

_WAIT_S = 20.0
"""Time for the trackers to take the rest after the run's end, in seconds."""


@contextmanager
def tracked(folder: RunFolder, trackers: Sequence[str], say: Callable[[str], None]) -> Iterator[None]:
    """Report to the trackers inside the context. A tracker that is away delays nothing, and fails nothing.

    The process is in a session of its own, so Ctrl-C does not end it, and ends after its standard input does: also if
    we are killed it first sends the rest.
    """
    if not trackers:
        yield
        return
    wanted = [argument for tracker in trackers for argument in ("--to", tracker)]
    log_path = folder.logs / "trackers.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "volley", "track", str(folder.path), "--follow", *wanted],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    say(f"reporting to {', '.join(trackers)} (log in {log_path})")
    try:
        yield
    finally:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            say(f"trackers are still sending; if {log_path} shows errors, `volley track {folder.path}` sends the rest")
        else:
            if process.returncode:
                say(f"not everything was reported: see {log_path}; `volley track {folder.path}` sends the rest")
