"""The score that a regular expression finds in what a judge says. Expressions of a run's configuration may take for
ever on a text that does not match; they are tried in a process that grades, which has two seconds of CPU for it.
"""

from __future__ import annotations

import re


def prepare(pattern: str, highest: float) -> None:
    """Compiled once, before the fork."""
    re.compile(pattern)


def last_match(pattern: str, highest: float, text: str) -> str | None:
    """The first group of the last match; None without one, and where a group `of` says that the number is out of
    another one than `highest`.
    """
    last = next(reversed(list(re.finditer(pattern, text))), None)
    if last is None:
        return None
    out_of = last.groupdict().get("of")
    try:
        return last[1] if out_of is None or float(out_of) == highest else None
    except ValueError:
        return None
