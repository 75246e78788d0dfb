"""Signs of life of a command that computes for long: on standard error, so that results stay alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from volley.printing import complain, has_status, show_status
from volley.reporting.lines import duration

_FIRST_S, _EACH_S = 1.0, 0.5
"""On a terminal, which has one line that is rewritten."""
_FIRST_LINE_S, _EACH_LINE_S = 3.0, 15.0
"""Elsewhere, a line each time."""

type Tell = Callable[[str], None]
"""Sets the part of the work that is being done, such as "step 12 of 40"."""


def silent(part: str) -> None:
    """Tell nothing."""


@contextmanager
def working(what: str) -> Iterator[Tell]:
    """Show `what`, the part that is told and the elapsed time, if the work takes more than a moment."""
    parts, ended, began = [""], threading.Event(), time.monotonic()
    on_terminal = has_status()

    def show() -> None:
        wait_s = _FIRST_S if on_terminal else _FIRST_LINE_S
        while not ended.wait(wait_s):
            part = f": {parts[0]}" if parts[0] else ""
            line = f"{what}{part} ({duration(time.monotonic() - began)})"
            with suppress(OSError):  # the terminal may be gone
                show_status(line) if on_terminal else complain(line)
            wait_s = _EACH_S if on_terminal else _EACH_LINE_S

    def tell(part: str) -> None:
        parts[0] = part

    thread = threading.Thread(target=show, name="working", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()
        if on_terminal and time.monotonic() - began >= _FIRST_S:
            with suppress(OSError):
                show_status("")
