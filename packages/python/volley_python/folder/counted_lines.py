"""Select the lines of a run's files that count: those of the ancestors of its newest durable state, the head.

The proof, the report, the comparison of runs, the best version and a resume all use this definition. Other lines were
undone, written by a replaced trainer, or added by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shared.errors import DecodeError
from shared.run import ledger
from shared.run.counted import is_ancestor, is_step, versions_of
from shared.run.ledger import TRAINED, Line
from shared.run.state import TrainerState
from shared.types import WeightVersion


def of_steps(rows: Iterable[Mapping[str, Any]], head: TrainerState | None) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of metrics and of supervised steps that count; all lines without a head.

    Lines of step 0 describe the data.
    """

    def fits(version: WeightVersion, head: TrainerState) -> bool:
        return is_step(version, head) if version.step else is_ancestor(version, head)

    return (row for row in rows if head is None or _all(row, head, fits))


def of_weights(rows: Iterable[Mapping[str, Any]], head: TrainerState | None) -> Iterator[Mapping[str, Any]]:
    """Yield the lines about weights, such as evaluations, that count."""
    return (row for row in rows if head is None or _all(row, head, is_ancestor))


def with_pending(lines: Sequence[Line], head: TrainerState) -> list[Line]:
    """Add lines of the ledger that only the head holds because of a crash, as the next start would."""
    settled = ledger.settled(lines)
    return [*lines, *(dict(line) for line in head.recent if not ledger.same(settled.get(line["ticket"]), line))]


def of_tickets(lines: Iterable[Line], head: TrainerState | None) -> list[Line]:
    """Return the line of each ticket that counts: of its training, else of its other end, by the highest epoch."""
    if head is None:
        return list(ledger.settled(lines).values())
    trained, ended = dict[int, Line](), dict[int, Line]()
    for one in ledger.surviving(with_pending([*lines], head)):
        if one["disposition"] != TRAINED:
            if one["epoch"] >= ended.get(one["ticket"], one)["epoch"]:
                ended[one["ticket"]] = one
        elif is_step(WeightVersion(one["epoch"], one["step"]), head):
            trained[one["ticket"]] = one
    return list({**ended, **trained}.values())


def _all(row: Mapping[str, Any], head: TrainerState, fits: Callable[[WeightVersion, TrainerState], bool]) -> bool:
    """True if all versions of a line fit; a line without versions counts up to the step of the head."""
    try:
        if versions := versions_of(row):
            return all(fits(version, head) for version in versions)
        return row["step"] <= head.step
    except (DecodeError, KeyError, TypeError, AttributeError):
        return False
