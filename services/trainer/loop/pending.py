"""What memory holds and the files or the queue do not know of yet: a value that changes by replacement.

A group that is taken for a step is *unrecorded* (memory has changed, neither log nor ledger tells of it), then
*committed* (its step has a durable record), then *settled* (the ledger names it and the queue has forgotten its
ticket). A ticket that ends without training is unrecorded, then settled.

Invariant: no checkpoint is made of a memory in which something is unrecorded. What could not be recorded stays here, so
that none is ever made of it.
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
    """`state` is that of the newest step with a durable record, or of the beginning; `saved` is the newest durable
    checkpoint. `finished` are trained tickets that the queue has not forgotten. `metrics` are lines that their file may
    not durably hold. `unrecorded` are the tickets of every change of memory that is not written down.
    """

    state: TrainerState
    saved: WeightVersion
    finished: tuple[Finished, ...] = ()
    metrics: tuple[Line, ...] = ()
    unrecorded: tuple[tuple[int, ...], ...] = ()

    @property
    def version(self) -> WeightVersion:
        """That of the newest step that counts."""
        return self.state.version

    @property
    def n_unsaved(self) -> int:
        """Steps since the newest checkpoint."""
        return self.state.step - self.saved.step

    def changed(self, tickets: tuple[int, ...]) -> Self:
        """Memory has changed for these tickets."""
        return replace(self, unrecorded=(*self.unrecorded, tickets))

    def recorded(self, tickets: tuple[int, ...]) -> Self:
        """Log or ledger tells of that change."""
        left = list(self.unrecorded)
        left.remove(tickets)
        return replace(self, unrecorded=tuple(left))

    def committed(self, state: TrainerState, finished: Iterable[Finished]) -> Self:
        """A durable record tells of a step."""
        return replace(self, state=state, finished=(*self.finished, *finished), metrics=state.metrics)

    def settled(self) -> Self:
        """The queue has forgotten the tickets of all steps."""
        return replace(self, finished=())

    def flushed(self) -> Self:
        """The file of metrics durably holds all lines."""
        return replace(self, metrics=())
