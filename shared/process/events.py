"""Log events that other programs look for, and the parser of a log line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

CANNOT_START = "cannot start"
"""A service cannot start because of a VolleyError; `detail` is the error's text."""
CRASHED = "worker crashed"
"""A worker raised something other than a VolleyError."""
FORCED = "did not end in time: ended by force"
"""A thread hung while the process was to end."""


def parse(line: str | bytes) -> Mapping[str, Any]:
    """Return the event of a JSON line of a log; empty if the line was written by something else."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}
