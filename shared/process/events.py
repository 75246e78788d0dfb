"""Log events that other programs look for, and the way back from a line to its event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

CANNOT_START = "cannot start"
"""A start that fails with an error of Volley's own; `detail` is the error's text."""
CRASHED = "worker crashed"
"""A worker raises something that is no error of Volley's own."""
FORCED = "did not end in time: ended by force"
"""A thread hangs when the process is to end."""


def parse(line: str | bytes) -> Mapping[str, Any]:
    """Return the event of a JSON line of a log; empty if the line was written by something else."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}
