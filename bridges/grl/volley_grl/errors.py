"""Error of a configuration that cannot be converted."""

from __future__ import annotations


class ConversionError(Exception):
    """A key has no counterpart in Volley. `hint` says what to do."""

    def __init__(self, detail: str, hint: str) -> None:
        super().__init__(f"{detail} ({hint})")
        self.hint = hint
