"""Violations that a proof can find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

MOST_OF_A_KIND = 100
_MAX_DETAIL = 500


class ViolationKind(StrEnum):
    """Kinds of violation."""

    FOLDER = "folder"  # the folder holds files that no run writes, or needs more work than a run of its size
    CHECKPOINT = "checkpoint"  # a retained checkpoint is damaged, or does not match its name
    COMMIT = "commit"  # a step's commit record is missing, damaged, or does not match its name
    STATE = "state"  # a checkpoint's bookkeeping contradicts itself, the ledger, or a later checkpoint
    CONFIG = "config"  # config.yaml or run.json differ from the settings of the newest checkpoint
    CHAIN = "chain"  # ledger or metrics changed after the checkpoints were made
    LEDGER = "ledger"  # a line of the ledger cannot be read, or differs from the one in a checkpoint
    LOST = "lost"  # a finished ticket without a disposition
    DOUBLY_TRAINED = "doubly_trained"  # a ticket that the weights were trained on twice
    TWO_DISPOSITIONS = "two_dispositions"  # a ticket with two dispositions
    NOT_IN_CHECKPOINT = "not_in_checkpoint"  # a disposition missing from the checkpoint that should hold its effect
    STEP = "step"  # a step with too few or too many groups
    ARCHIVE = "archive"  # a step's archive is missing, damaged, or holds other groups than the ledger says
    DIGEST = "digest"  # an archived group is not the one that was trained
    GROUP = "group"  # an archived group is invalid, or larger than configured
    MIXTURE = "mixture"  # a line of mixture.jsonl cannot be read, or a group is of another environment
    STALENESS = "staleness"  # a trained token was older than the bound
    LINEAGE = "lineage"  # a token was sampled by weights that are no ancestors of those trained on it
    # a line of metrics.jsonl is missing, unreadable, out of order, or differs from the one in a checkpoint
    METRICS = "metrics"
    QUEUE = "queue"  # Redis has finished something that is not durable, or lost a ticket


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding, or a summary of `n` findings; `file` is relative to the run's folder."""

    kind: ViolationKind
    detail: str
    ticket: int | None = None
    step: int | None = None
    file: str | None = None
    n: int = 1

    def __str__(self) -> str:
        places = {"ticket": self.ticket, "step": self.step, "file": self.file}
        named = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
        return f"{self.kind}: {named}: {self.detail}" if named else f"{self.kind}: {self.detail}"


class ViolationList:
    """Collects violations: the first hundred of each kind, and counts. Bounded, whatever the folder holds."""

    def __init__(self) -> None:
        self.named: list[Violation] = []
        self.counts: Counter[ViolationKind] = Counter()
        self._named: Counter[ViolationKind] = Counter()
        self._tickets: dict[ViolationKind, set[int]] = {}

    def add(self, violations: Iterable[Violation]) -> None:
        for one in violations:
            self.counts[one.kind] += one.n
            if one.ticket is not None:
                self._tickets.setdefault(one.kind, set()).add(one.ticket)
            if self._named[one.kind] < MOST_OF_A_KIND:
                self._named[one.kind] += 1
                self.named.append(replace(one, detail=one.detail[:_MAX_DETAIL]))

    def tickets(self, kind: ViolationKind) -> int:
        """Number of tickets with violations of this kind."""
        return len(self._tickets.get(kind, ())) + sum(
            one.n for one in self.named if one.kind == kind and one.ticket is None
        )

    def all(self) -> list[Violation]:
        """All collected violations, and a summary for each kind with more."""
        shown = Counter[ViolationKind]()
        for one in self.named:
            shown[one.kind] += one.n
        more = [(kind, n - shown[kind]) for kind, n in self.counts.items() if n > shown[kind]]
        return [*self.named, *(Violation(kind, f"and {n} more of this kind", n=n) for kind, n in more)]
