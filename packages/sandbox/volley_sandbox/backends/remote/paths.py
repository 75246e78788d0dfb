"""Dotted paths into answers of remote servers."""

from __future__ import annotations

from typing import Any


def at_path(value: Any, path: str) -> Any:
    """Value at a path like `board.rows.0`; None if there is none."""
    for key in path.split("."):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value
