"""Choose the progress display for standard output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from volley.printing import print_lines
from volley.reporting.progress import PlainLines, ProgressDisplay, is_terminal


@contextmanager
def shown(max_steps: int) -> Iterator[ProgressDisplay]:
    """Open a live display if standard output is a terminal that can move its cursor, else plain lines."""
    if not is_terminal():
        yield PlainLines(max_steps, print_lines)
        return
    from volley.reporting.live import LiveDisplay

    with LiveDisplay.opened(max_steps) as display:
        yield display
