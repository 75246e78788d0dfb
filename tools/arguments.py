"""Types of command-line arguments shared by several tools."""

from __future__ import annotations

import argparse
import contextlib
import math


def count(text: str) -> int:
    """Parse an integer, 0 or more. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if (n := int(text)) >= 0:
            return n
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")


def minutes(text: str) -> float:
    """Finite number of minutes, 0 or more. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if math.isfinite(60 * (n := float(text))) and n >= 0:
            return n
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes, 0 or more")
