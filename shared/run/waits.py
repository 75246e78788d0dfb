"""Waits that a service reports."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import Party


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait; `why` is a sentence about it."""

    on: Party
    why: str
