"""Choose the progress display for standard output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared import packages
from volley.printing import print_lines
from volley.reporting.progress import PlainLines, ProgressDisplay, is_terminal


@contextmanager
def shown(max_steps: int) -> Iterator[ProgressDisplay]:
    """Open a live display if a package has one and standard output is a terminal that can move its cursor.

    Otherwise print plain lines.
    """
    live = packages.part("live_display", required=False) if is_terminal() else None
    if live is None:
        yield PlainLines(max_steps, print_lines)
        return
    with live(max_steps) as display:
        yield display
