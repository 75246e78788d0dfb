"""Proofs of folders, which packages bring: what a check found, and the check for a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import packages
from volley.reporting.working import Tell, silent

_LAST = "run"
"""Asked last: every folder with a configuration may be a run's."""


@dataclass(frozen=True, slots=True)
class Proof:
    """`result` is printed with --json, and its `ok` is the verdict; `text` is printed without."""

    result: dict[str, Any]
    text: str


type Prove = Callable[[Path, Tell], Proof | None]
"""Check a folder; None for a folder of another kind. Told the name of each part. Raises ConfigError."""


def prove(folder: Path, tell: Tell = silent) -> Proof | None:
    """Check a folder with the package for its kind; None if no installed package knows it. Raises ConfigError."""
    points = packages.found(packages.PROOFS)
    for name in sorted(points, key=lambda name: name == _LAST):
        check: Prove = packages.load(points[name])
        if (proof := check(folder, tell)) is not None:
            return proof
    return None
