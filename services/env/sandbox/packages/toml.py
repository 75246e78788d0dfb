"""TOML of strangers, read in a bounded time: the parser of the standard library takes the square of a key's dots."""

from __future__ import annotations

import tomllib
from typing import Any

from shared.errors import InputError

MAX_BYTES = 2**16
MAX_DOTS = 100
"""On one line, where a key ends at the latest."""


def read_toml(text: str, failed: str) -> dict[str, Any]:
    """Takes less than a second. Args: failed: what to say first of a text that is none. Raises InputError."""
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_BYTES:
        raise InputError(f"{failed}: it has {size} bytes", f"at most {MAX_BYTES} are taken")
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise InputError(f"{failed}: a line has more than {MAX_DOTS} dots", "write lists with one entry a line")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of a number, too
        raise InputError(f"{failed}: {str(error)[:200]}") from None
