"""The live display at a terminal, the only module that imports rich: lines that stay, and below them the rows of what
goes on, drawn anew a few times a second. When it closes, however that comes, the rows are gone and the cursor is back.
Once the terminal is gone, nothing is shown, and nothing fails because of it.
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
from volley.reporting.phases import PhaseRow, RunPhases
from volley.reporting.progress import Activity, Record, RecordKind

_A_SECOND = 4
_WIDEST_BAR = 30
_BESIDE_BAR = 50
"""Columns that names and figures need; narrower terminals than this and the shortest bar have none."""
_SHORTEST_BAR = 6


class LiveDisplay:
    """Made by `opened`; the calls come from one thread, another one draws.

    A lock keeps both from writing at a time (rich counts the rows on the screen before it writes, not while), and from
    reading phases that change.
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
            with suppress(OSError, ValueError):  # what failed may have been the drawing itself
                console.file.write("\x1b[?25h")
                console.file.flush()

    def say(self, line: str) -> None:
        with self._writing():
            self._console.print(Text(visible(line)), soft_wrap=True)

    def service(self, name: str, state: ServiceState) -> None:
        with self._writing():
            self._stay(self._phases.service(name, state))

    def record(self, kind: RecordKind, record: Record) -> None:
        with self._writing():
            self._stay(self._phases.record(kind, record))

    def activity(self, activity: Activity) -> None:
        with self._lock:
            self._phases.activity(activity)

    def quiet(self, waiting: str) -> None:
        with self._lock:
            self._phases.quiet(waiting)

    def refresh(self) -> None:
        """Draws the rows now; they are drawn a few times a second anyway."""
        with self._writing():
            self._live.refresh()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Inside, no other thread writes. From the first error of the terminal on, nothing is written."""
        with self._lock:
            try:
                yield
            except BlockingIOError:
                pass  # it is only slow
            except OSError:
                self._console.quiet = True

    @contextmanager
    def _drawn(self) -> Iterator[None]:
        """Inside, the rows are drawn a few times a second."""
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
        """The rows of what goes on; none is wider than the terminal."""
        bar = min(_WIDEST_BAR, (self._console.width - _BESIDE_BAR) // 3)
        wide = bar >= _SHORTEST_BAR
        table = Table.grid(padding=(0, 1))
        for _ in range(3 if wide else 2):
            table.add_column(no_wrap=True)
        table.add_column()  # the only one that is cut
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
            self._console.print(text, soft_wrap=True)
        self.refresh()


def _bar(row: PhaseRow, width: int) -> ProgressBar | Text:
    return Text("") if row.done is None or not row.total else ProgressBar(row.total, row.done, width=width)
