"""`volley track` as a process beside a run, as `volley train` and `volley follow` start it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shared.run.folder import RunFolder
from shared.run_config import value_of
from shared.schema import RunConfig
from shared.visible import quoted
from volley.reporting.progress import print_text
from volley_dashboard import helper_process
from volley_dashboard.keys import TRACKERS

_WAIT_S = 20.0
"""Time for the trackers to take the rest after the run's end, in seconds."""


def sidecar(folder: RunFolder, config: RunConfig) -> AbstractContextManager[None]:
    """Report a run to the trackers that its configuration names, inside the context."""
    trackers = value_of(config, TRACKERS)
    return tracked(folder, trackers, print_text) if trackers else nullcontext()


@contextmanager
def tracked(folder: RunFolder, trackers: Sequence[str], say: Callable[[str], None]) -> Iterator[None]:
    """Report to the trackers inside the context. A tracker that is away delays nothing, and fails nothing.

    The process sends the rest before it ends, also if this one is killed.
    """
    wanted = [argument for tracker in trackers for argument in ("--to", tracker)]
    log_path = folder.logs / "trackers.log"
    started = helper_process.start(["track", str(folder.path), "--follow", *wanted], log_path)
    say(f"reporting to {', '.join(trackers)} (log in {log_path})")
    try:
        yield
    finally:
        code = helper_process.end_input(started, _WAIT_S)
        if code is None:
            say(
                f"trackers are still sending; if {log_path} shows errors, `volley track {quoted(folder.path)}` sends"
                " the rest"
            )
        elif code:
            say(f"not everything was reported: see {log_path}; `volley track {quoted(folder.path)}` sends the rest")
