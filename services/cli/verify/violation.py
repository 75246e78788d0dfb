"""What a proof can fail by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The classes of violation."""

    CHECKPOINT = "checkpoint"  # a retained checkpoint is damaged, or not what its name says
    STATE = "state"  # a checkpoint's bookkeeping contradicts itself, the ledger, or a later checkpoint
    LEDGER = "ledger"  # a line of the ledger cannot be read
    LOST = "lost"  # a finished ticket without a disposition
    DOUBLY_TRAINED = "doubly_trained"  # a ticket whose effect is in the weights twice
    TWO_DISPOSITIONS = "two_dispositions"  # a ticket that ended in two ways
    NOT_IN_CHECKPOINT = "not_in_checkpoint"  # a disposition the checkpoint that should hold its effect does not know of
    STEP = "step"  # a step without exactly its number of groups
    ARCHIVE = "archive"  # a step's archive is missing, damaged, or holds other groups than the ledger says
    DIGEST = "digest"  # an archived group is not the one that was trained
    GROUP = "group"  # an archived group is no valid group, or larger than configured
    STALENESS = "staleness"  # a token older than the bound when it was trained
    LINEAGE = "lineage"  # a token sampled by weights that are no ancestors of those it trained
    METRICS = "metrics"  # steps of metrics.jsonl that repeat or go back
    QUEUE = "queue"  # Redis knows of something that is not durable, or has lost a ticket


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding; `file` is relative to the run's folder."""

    kind: Kind
    detail: str
    ticket: int | None = None
    step: int | None = None
    file: str | None = None

    def __str__(self) -> str:
        places = {"ticket": self.ticket, "step": self.step, "file": self.file}
        named = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
        return f"{self.kind}: {named}: {self.detail}" if named else f"{self.kind}: {self.detail}"
