"""Live display on a terminal.

Permanent lines, and below them rows of current activity, redrawn four times a second. The only module that imports
rich. However the display closes, it removes the rows and restores the cursor. If the terminal is gone, permanent lines
go to the run's log (`volley.printing.keep_lines`), and nothing is raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from shared.visible import visible
from volley.local.supervisor import ServiceState
from volley.printing import keep_lines
from volley.reporting.progress import Activity, Record, RecordKind
from volley_dashboard.terminal.phases import PhaseRow, RunPhases

_A_SECOND = 4
_WIDEST_BAR = 30
_BESIDE_BAR = 50
"""Columns for names and figures; terminals too narrow for these and the shortest bar show no bars."""
_SHORTEST_BAR = 6


class LiveDisplay:
    """Made by `opened`. One thread calls it, another draws.

    A lock keeps the two from writing at once (rich counts the rows on the screen before it writes), and from reading
    phases while they change.
    """

    quiet_s = 10.0
    detailed = True

    def __init__(self, console: Console, phases: RunPhases) -> None:
        self._console, self._phases = console, phases
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(
            get_renderable=self.table,
            console=console,
            auto_refresh=False,
            transient=True,
            vertical_overflow="crop",
        )
        self._lock = threading.RLock()

    @classmethod
    @contextmanager
    def opened(
        cls, max_steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[Self]:
        console = console or Console(force_terminal=True, highlight=False, emoji=False, markup=False)
        display = cls(console, RunPhases(max_steps, clock))
        try:
            display._live.start()
            try:
                with display._drawn():
                    yield display
            finally:
                with suppress(OSError):
                    display._live.stop()
        finally:
            with suppress(OSError, ValueError):  # the drawing itself may have failed
                console.file.write("\x1b[?25h")
                console.file.flush()

    def say(self, line: str) -> None:
        self._print(line, Text(visible(line)))

    def service(self, name: str, state: ServiceState) -> None:
        with self._lock:
            self._stay(self._phases.service(name, state))

    def record(self, kind: RecordKind, record: Record) -> None:
        with self._lock:
            self._stay(self._phases.record(kind, record))

    def activity(self, activity: Activity) -> None:
        with self._lock:
            self._phases.activity(activity)

    def quiet(self, waiting: str) -> None:
        with self._lock:
            self._phases.quiet(waiting)

    def refresh(self) -> None:
        """Draw the rows now, in addition to the periodic drawing."""
        with self._writing():
            self._live.refresh()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Exclude other threads from writing. After the terminal's first error nothing is written."""
        with self._lock:
            try:
                yield
            except BlockingIOError:
                pass  # the terminal is only slow
            except OSError:
                self._console.quiet = True

    @contextmanager
    def _drawn(self) -> Iterator[None]:
        """Draw the rows periodically inside the context."""
        ended = threading.Event()

        def draw() -> None:
            while not ended.wait(1 / _A_SECOND):
                self.refresh()

        thread = threading.Thread(target=draw, name="display", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def table(self) -> Table:
        """Rows of current activity, none wider than the terminal."""
        bar = min(_WIDEST_BAR, (self._console.width - _BESIDE_BAR) // 3)
        wide = bar >= _SHORTEST_BAR
        table = Table.grid(padding=(0, 1))
        for _ in range(3 if wide else 2):
            table.add_column(no_wrap=True)
        table.add_column()  # the only column that is cut
        for row in self._phases.rows():
            detail = Text(visible(row.detail), no_wrap=True, overflow="ellipsis")
            bars = [_bar(row, bar)] if wide else []
            table.add_row(self._spinner, Text(visible(row.name), style="bold"), *bars, detail)
        return table

    def _stay(self, lines: list[str]) -> None:
        for line in lines:
            text = Text(visible(line))
            text.stylize("green", 0, 1)
            text.stylize("bold", 2, 12)
            self._print(line, text)
        self.refresh()

    def _print(self, line: str, text: Text) -> None:
        """Print a permanent line, or keep it elsewhere if the terminal is gone."""
        with self._writing():
            self._console.print(text, soft_wrap=True)
        if self._console.quiet:
            keep_lines(line)


def _bar(row: PhaseRow, width: int) -> ProgressBar | Text:
    return Text("") if row.done is None or not row.total else ProgressBar(row.total, row.done, width=width)
