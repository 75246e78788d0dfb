"""What a proof can fail by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

MOST_OF_A_KIND = 100
_MAX_DETAIL = 500


class ViolationKind(StrEnum):
    """The classes of violation."""

    FOLDER = "folder"  # something that no run leaves in its folder, or more work than a run of its size is
    CHECKPOINT = "checkpoint"  # a retained checkpoint is damaged, or not what its name says
    COMMIT = "commit"  # a step's commit record is missing, damaged, or not what its name says
    STATE = "state"  # a checkpoint's bookkeeping contradicts itself, the ledger, or a later checkpoint
    CONFIG = "config"  # config.yaml or run.json are not what the newest checkpoint was made under
    CHAIN = "chain"  # ledger and metrics are not those that the checkpoints were made after
    LEDGER = "ledger"  # a line of the ledger cannot be read, or is another than a checkpoint holds
    LOST = "lost"  # a finished ticket without a disposition
    DOUBLY_TRAINED = "doubly_trained"  # a ticket whose effect is in the weights twice
    TWO_DISPOSITIONS = "two_dispositions"  # a ticket that ended in two ways
    NOT_IN_CHECKPOINT = "not_in_checkpoint"  # a disposition the checkpoint that should hold its effect does not know of
    STEP = "step"  # a step without exactly its number of groups
    ARCHIVE = "archive"  # a step's archive is missing, damaged, or holds other groups than the ledger says
    DIGEST = "digest"  # an archived group is not the one that was trained
    GROUP = "group"  # an archived group is no valid group, or larger than configured
    MIXTURE = "mixture"  # a line of mixture.jsonl cannot be read, or a group is of another environment than they say
    STALENESS = "staleness"  # a token older than the bound when it was trained
    LINEAGE = "lineage"  # a token sampled by weights that are no ancestors of those it trained
    # a line of metrics.jsonl is missing, cannot be read, goes back, or is another than a checkpoint holds
    METRICS = "metrics"
    QUEUE = "queue"  # Redis knows of something that is not durable, or has lost a ticket


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding, or `n` of which the others are told together; `file` is relative to the run's folder."""

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


class Findings:
    """Violations as they are found: of each kind the first hundred, and how many there are. Bounded, whatever is in the
    folder.
    """

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
        """How many tickets such violations name or stand for."""
        return len(self._tickets.get(kind, ())) + sum(
            one.n for one in self.named if one.kind == kind and one.ticket is None
        )

    def all(self) -> list[Violation]:
        """The named ones, and a line for each kind of which there are more."""
        told = Counter[ViolationKind]()
        for one in self.named:
            told[one.kind] += one.n
        more = [(kind, n - told[kind]) for kind, n in self.counts.items() if n > told[kind]]
        return [*self.named, *(Violation(kind, f"and {n} more of this kind", n=n) for kind, n in more)]
