"""Dotted paths into what a remote server answers."""

from __future__ import annotations

from typing import Any


def at_path(value: Any, path: str) -> Any:
    """What lies at `board.rows.0`; None where nothing does."""
    for key in path.split("."):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value
