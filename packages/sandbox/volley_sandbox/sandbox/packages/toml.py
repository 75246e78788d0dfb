"""Reader of untrusted TOML in bounded time; the standard library's parser is quadratic in the dots of a key."""

from __future__ import annotations

import tomllib
from typing import Any

from shared.errors import InputError

MAX_BYTES = 2**16
MAX_DOTS = 100
"""Dots on one line; a key does not extend beyond its line."""


def read_toml(text: str, failed: str) -> dict[str, Any]:
    """Parse TOML in less than a second.

    Args:
        failed: beginning of the error message.

    Raises InputError.
    """
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_BYTES:
        raise InputError(f"{failed}: it has {size} bytes", f"the limit is {MAX_BYTES}")
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise InputError(f"{failed}: a line has more than {MAX_DOTS} dots", "write lists with one entry per line")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers raise these, too
        raise InputError(f"{failed}: {str(error)[:200]}") from None
