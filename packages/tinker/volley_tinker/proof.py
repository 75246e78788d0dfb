"""Proof that a Tinker server settled each future once."""

from __future__ import annotations

from pathlib import Path

from volley.printing import join_lines
from volley.proof import Proof
from volley.reporting.working import Tell, silent
from volley_tinker import futures


def prove(folder: Path, _: Tell = silent) -> Proof | None:
    """Check the records of a Tinker server's folder; None for another folder. Raises ConfigError."""
    if not (folder / futures.DATABASE).exists():
        return None
    problems, counts = [*futures.problems(folder)], futures.counts(folder)
    told = f"{counts['settled']} futures of {counts['models']} models settled once, {counts['pending']} pending"
    lines = ["not proven:", *problems] if problems else [f"proven: {told}"]
    return Proof({"ok": not problems, **counts, "violations": problems}, join_lines(lines))
