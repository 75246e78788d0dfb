"""What services wrote when they ended by themselves, and must not have: a supervisor that restarts
everything hides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

_CRASHES = ("worker crashed", "did not end in time: ended by force")
_TRACEBACK = "Traceback (most recent call last):"
_EXPECTED = ("ended with signal 9", "ended with exit code 1")
"""Our own kills, and ends that the logs explain: `worker failed` is an error of Volley's own, such as Fenced."""


def crashes(folder: Path) -> list[str]:
    """One sentence for every crash in the logs: which service, and the last line of what it said of it."""
    return [f"{path.stem}: {what}" for path in sorted(folder.glob("*.log")) for what in _of(path)]


def deaths(said: Sequence[str]) -> list[str]:
    """Lines of the supervisor about processes that hung, or ended in a way that nobody intended."""
    return [line for line in said if not any(end in line for end in _EXPECTED)]


def _of(path: Path) -> Iterator[str]:
    lines = iter(path.read_text(errors="replace").splitlines())
    for line in lines:
        if line.startswith(_TRACEBACK):
            yield next((text for text in lines if text and not text.startswith(" ")), _TRACEBACK)
        elif any(crash in line for crash in _CRASHES):
            yield from _event(line)


def _event(line: str) -> Iterator[str]:
    """The last line of the event's traceback, or the event; nothing if the line only quotes one."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return
    if isinstance(event, dict) and event.get("event") in _CRASHES:
        traceback = str(event.get("traceback") or "").strip().splitlines()
        yield ": ".join([event["event"], *traceback[-1:]])
