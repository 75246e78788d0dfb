"""Changes in memory that the files or the queue do not have yet.

A group that is taken for a step is *unrecorded* (memory has changed, neither log nor ledger says so), then *committed*
(its step has a durable record), then *settled* (the ledger names it and the queue has forgotten its ticket). A ticket
that ends without training is unrecorded, then settled.

Invariant: no checkpoint is made while a change is unrecorded. A change that could not be recorded stays unrecorded, so
no checkpoint ever holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from shared.queue.records import Finished
from shared.run.state import TrainerState
from shared.types import WeightVersion

type Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Immutable record of the pending work; each method returns a changed copy.

    `state` is the state after the newest step with a durable record, or at the beginning; `saved` is the newest durable
    checkpoint. `finished` are trained tickets that the queue has not forgotten. `metrics` are lines that may not be
    durable in metrics.jsonl. `unrecorded` has the tickets of each unrecorded change.
    """

    state: TrainerState
    saved: WeightVersion
    finished: tuple[Finished, ...] = ()
    metrics: tuple[Line, ...] = ()
    unrecorded: tuple[tuple[int, ...], ...] = ()

    @property
    def version(self) -> WeightVersion:
        """Version of the newest committed step."""
        return self.state.version

    @property
    def n_unsaved(self) -> int:
        """Steps since the newest checkpoint."""
        return self.state.step - self.saved.step

    def changed(self, tickets: tuple[int, ...]) -> Self:
        """Add an unrecorded change of these tickets."""
        return replace(self, unrecorded=(*self.unrecorded, tickets))

    def recorded(self, tickets: tuple[int, ...]) -> Self:
        """Remove a change that log or ledger now records."""
        left = list(self.unrecorded)
        left.remove(tickets)
        return replace(self, unrecorded=tuple(left))

    def committed(self, state: TrainerState, finished: Iterable[Finished]) -> Self:
        """Add a step that has a durable record."""
        return replace(self, state=state, finished=(*self.finished, *finished), metrics=state.metrics)

    def settled(self) -> Self:
        """Clear `finished`: the queue has forgotten the tickets of all steps."""
        return replace(self, finished=())

    def flushed(self) -> Self:
        """Clear `metrics`: all lines are durable in metrics.jsonl."""
        return replace(self, metrics=())
