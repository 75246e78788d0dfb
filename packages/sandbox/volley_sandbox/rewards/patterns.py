"""Search for a score in a judge's answer by regular expression.

Configured expressions can take exponential time on text that does not match, so they run in a grading process, which
bounds them to two seconds of CPU time.
"""

from __future__ import annotations

import re


def prepare(pattern: str, highest: float) -> None:
    """Compile the pattern once, before the fork."""
    re.compile(pattern)


def last_match(pattern: str, highest: float, text: str) -> str | None:
    """First group of the last match; None without a match, or if its group `of` differs from `highest`."""
    last = next(reversed(list(re.finditer(pattern, text))), None)
    if last is None:
        return None
    out_of = last.groupdict().get("of")
    try:
        return last[1] if out_of is None or float(out_of) == highest else None
    except ValueError:
        return None
