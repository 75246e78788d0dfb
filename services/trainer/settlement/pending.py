"""What memory holds and the files or the queue do not know of yet: a value that changes by replacement.

A group that is taken for a step is *unrecorded* (memory has changed, neither archive nor ledger tells of it), then
*trained* (its step is archived, no checkpoint holds it), then *saved* (a durable checkpoint holds it, and so does the
ledger), then *settled* (the queue has forgotten its ticket). A ticket that ends without training is unrecorded, then
settled.

Invariant: no checkpoint is made of a memory in which something is unrecorded. What could not be recorded stays here, so
that none is ever made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from shared.queue.records import Finished
from shared.types import WeightVersion

type Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that is trained and archived. `finished` are its tickets and `ledger` the lines that will end them, both
    in the order of training; `metrics` is its line of metrics.jsonl.
    """

    version: WeightVersion
    finished: tuple[Finished, ...]
    ledger: tuple[Line, ...]
    metrics: Line


@dataclass(frozen=True, slots=True)
class PendingWork:
    """`durable` is the newest checkpoint whose tickets the ledger names; `steps` are those the queue has not heard of,
    in their order: they follow on `durable` without a gap, until they are saved. `metrics` are lines that their file
    may not durably hold. `unrecorded` are the tickets of every change of memory that is not written down.
    """

    durable: WeightVersion
    steps: tuple[PendingStep, ...] = ()
    metrics: tuple[Line, ...] = ()
    unrecorded: tuple[tuple[int, ...], ...] = ()

    @property
    def version(self) -> WeightVersion:
        """That of the weights in memory."""
        return self.steps[-1].version if self.steps else self.durable

    @property
    def unsaved(self) -> tuple[PendingStep, ...]:
        """The steps since the newest durable checkpoint, in their order."""
        return tuple(step for step in self.steps if step.version > self.durable)

    @property
    def finished(self) -> list[Finished]:
        """What the queue has to forget."""
        return [one for step in self.steps for one in step.finished]

    @property
    def ledger(self) -> tuple[Line, ...]:
        """The lines that end these tickets."""
        return tuple(line for step in self.steps for line in step.ledger)

    def changed(self, tickets: tuple[int, ...]) -> Self:
        """Memory has changed for these tickets."""
        return replace(self, unrecorded=(*self.unrecorded, tickets))

    def recorded(self, tickets: tuple[int, ...]) -> Self:
        """Archive or ledger tells of that change."""
        left = list(self.unrecorded)
        left.remove(tickets)
        return replace(self, unrecorded=tuple(left))

    def trained(self, step: PendingStep) -> Self:
        return replace(self, steps=(*self.steps, step), metrics=(*self.metrics, step.metrics))

    def saved(self, version: WeightVersion) -> Self:
        """A durable checkpoint holds all steps, and the ledger names their tickets."""
        return replace(self, durable=version)

    def settled(self) -> Self:
        """The queue has forgotten the tickets of all steps."""
        return replace(self, steps=())

    def flushed(self) -> Self:
        """The file of metrics durably holds all lines."""
        return replace(self, metrics=())
