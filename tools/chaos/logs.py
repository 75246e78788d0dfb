"""Find unexpected ends of services, which a supervisor's restarts would hide."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from shared.errors import VolleyError
from shared.process.events import CRASHED, FORCED, parse
from shared.process.exit_codes import AGAIN, FAILED
from volley.local.supervisor import ServiceExit

_TRACEBACK = "Traceback (most recent call last):"
_BORDER = " |+-"
"""Frame that Python draws around the tracebacks of an exception group."""
_EXPECTED = (-signal.SIGKILL, FAILED, AGAIN)
"""Exit codes of injected kills, and of ends that the logs explain."""


def crashes(folder: Path) -> list[str]:
    """One sentence per crash in the logs: the service, and the last frame and line of its traceback."""
    return [f"{path.stem}: {what}" for path in sorted(folder.glob("*.log")) for what in _of(path)]


def deaths(ends: Iterable[ServiceExit]) -> list[str]:
    """One sentence per process that hung, or ended with an unexpected code."""
    return [str(end) for end in ends if end.hung_s is not None or end.code not in _EXPECTED]


def failed_with(log: Path, start: int, kind: type[VolleyError]) -> bool:
    """Tell if a worker ended with this error, from the log's events after byte `start`.

    The error need not be the last event: remaining threads may log later.
    """
    with log.open("rb") as lines:
        lines.seek(start)
        return any(parse(line).get("error") == kind.__name__ for line in lines)


def _of(path: Path) -> Iterator[str]:
    lines = iter(path.read_text(errors="replace", encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(_TRACEBACK):
            yield next((text for text in lines if text and not text.startswith(" ")), _TRACEBACK)
        elif (event := parse(line)).get("event") in (CRASHED, FORCED):
            traceback = [
                text for line in str(event.get("traceback") or "").splitlines() if (text := line.strip(_BORDER))
            ]
            frames = [line.removeprefix("File ") for line in traceback if line.startswith("File ")]
            yield ": ".join([event["event"], *frames[-1:], *traceback[-1:]])
