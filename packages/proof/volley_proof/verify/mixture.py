"""Read mixture.jsonl, the environment of each ticket. The number of tickets bounds the work."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from shared.data_schema import DataSection
from shared.files.reading import whole_lines
from shared.run.mixture import MOST_CHANGES, TicketAssignment, replayed
from shared.run.shares import configured, weights_of
from volley_proof.verify.violation import Violation, ViolationKind


def assigned(path: Path, data: DataSection, until: int) -> tuple[TicketAssignment, list[Violation]]:
    """Assignment of tickets up to `until`, from configuration and file; a run without changes has no file."""
    assignment = TicketAssignment(weights_of(configured(data)))
    try:
        wrong = replayed(assignment, islice(whole_lines(path), MOST_CHANGES), until)
    except OSError as error:
        wrong = [f"it cannot be read: {error.strerror}"]
    return assignment, [Violation(ViolationKind.MIXTURE, detail, file=path.name) for detail in wrong]
