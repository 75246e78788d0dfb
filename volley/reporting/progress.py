"""Progress of a run: a live display on a terminal, plain lines elsewhere.

Sources: the run's files (`RecordTails`), the status of trainer and orchestrator (`Activity`), and the supervisor.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shared.run.folder import RunFolder
from shared.visible import visible
from volley.local.supervisor import ServiceState
from volley.printing import is_json, print_block, print_lines
from volley.reporting.jsonl import JsonlTail
from volley.reporting.lines import eval_line, sft_line, step_line

type RecordKind = Literal["sft", "step", "evaluation"]
type Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Activity:
    """Answers of orchestrator (`run`: GET /runs/NAME) and trainer (`trainer`: GET /status); empty if there is none."""

    run: Mapping[str, Any] = field(default_factory=dict[str, Any])
    trainer: Mapping[str, Any] = field(default_factory=dict[str, Any])


class ProgressDisplay(Protocol):
    """Shows the events of a run.

    `quiet_s`: call `quiet` after so many seconds without a record. `detailed`: call `activity` between records.
    """

    quiet_s: float
    detailed: bool

    def say(self, line: str, /) -> None:
        """Print a permanent line."""

    def service(self, name: str, state: ServiceState) -> None: ...

    def record(self, kind: RecordKind, record: Record) -> None: ...

    def activity(self, activity: Activity) -> None: ...

    def quiet(self, waiting: str) -> None:
        """Args: waiting: what the run waits for."""


class RecordTails:
    """Records that the services have added to the run's files since the last call."""

    def __init__(self, folder: RunFolder) -> None:
        files: tuple[tuple[RecordKind, Any], ...] = (
            ("sft", folder.sft),
            ("step", folder.metrics),
            ("evaluation", folder.evals),
        )
        self._tails: list[tuple[RecordKind, JsonlTail]] = [
            (kind, JsonlTail(path, from_end=True)) for kind, path in files
        ]

    def new(self) -> list[tuple[RecordKind, Record]]:
        return [(kind, record) for kind, tail in self._tails for record in tail.new()]


class PlainLines:
    """Prints one line per event, for pipes and files: no control codes, no line is cut."""

    quiet_s = 30.0
    detailed = False

    def __init__(self, max_steps: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.say, self._max_steps, self._clock = say, max_steps, clock
        self._began = clock()
        self._started: dict[str, float] = {}
        self._services: dict[str, ServiceState] = {}
        self._answered = False

    def service(self, name: str, state: ServiceState) -> None:
        self._services[name] = state
        if state == "starting":
            self._started[name] = self._clock()
        elif state == "up":
            self.say(f"{name} answers after {self._clock() - self._started[name]:.1f} s")
            if not self._answered and all(one == "up" for one in self._services.values()):
                self._answered = True
                self.say(f"all services answer after {self._clock() - self._began:.1f} s")

    def record(self, kind: RecordKind, record: Record) -> None:
        line = {"sft": sft_line, "step": self._step_line, "evaluation": eval_line}[kind](record)
        if line:
            self.say(line)

    def activity(self, activity: Activity) -> None:
        """Ignored: it changes all the time."""

    def quiet(self, waiting: str) -> None:
        self.say(f"no news for {self.quiet_s:g} s; {waiting}")

    def _step_line(self, record: Record) -> str:
        return step_line(record, self._max_steps)


def is_terminal() -> bool:
    """Return True if lines go to a terminal that can move its cursor."""
    return not is_json() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def print_text(text: str) -> None:
    """Print a sentence, wrapped between words on a terminal, else as one line."""
    if is_terminal():
        width = shutil.get_terminal_size().columns
        print_block(textwrap.fill(visible(text), width, break_long_words=False, break_on_hyphens=False))
    else:
        print_lines(text)
