"""Values that go into and come out of the ticket queue."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shared.types import Lineage


@dataclass(frozen=True, slots=True)
class Reservation:
    """Permission to generate the group of `ticket`; `version` is the newest durable step of the trainer."""

    ticket: int
    version: int


class PublishRefusal(StrEnum):
    """Reason why no ticket can be reserved now."""

    NOT_READY = "not_ready"  # no trainer has started, or one is repairing the queue
    FULL = "full"  # one more group could be older than max_staleness steps when it is trained
    EXHAUSTED = "exhausted"  # enough tickets for the whole run are issued


class Published(StrEnum):
    """Result of publishing a group. Only NOT_READY asks for another attempt."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"  # the ticket is already queued
    DONE = "done"  # the ticket is already finished
    UNKNOWN = "unknown"  # the ticket was never issued in this lineage
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One queued group.

    `deliveries` is 1 the first time. It grows by one for each trainer incarnation that read the entry and crashed
    without having committed a step, so it counts crashes that this entry may have caused.
    """

    entry_id: str
    ticket: int
    payload: bytes
    deliveries: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A ticket whose effect is durable; `entry_id` is None if it was never read from the queue."""

    ticket: int
    entry_id: str | None = None


@dataclass(frozen=True, slots=True)
class QueueState:
    """Snapshot of the queue.

    `version`, `low` and `void` are the trainer's last commit. `depth` counts queued groups (read but uncommitted ones
    included), `leased` tickets out for generation or waiting to be issued again, `done` finished tickets above `low`,
    `dead` kept poisoned entries. `refused` is why the trainer has stopped training; empty if it has not. `lineage` is
    the run's since this epoch was opened; `beginning` identifies the run; it changes when a run is emptied and started
    anew; both are empty if the trainer has not set them. The counters `reissued`, `duplicates` (published twice) and
    `strays` (published, never issued) only grow.
    """

    issued: int
    low: int
    version: int
    epoch: int
    ready: bool
    void: int
    depth: int
    leased: int
    done: int
    dead: int
    reissued: int
    duplicates: int
    strays: int
    refused: str = ""
    lineage: Lineage = ()
    beginning: str = ""
