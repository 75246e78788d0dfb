"""The copy of a run's folder elsewhere, which a package brings (part `bucket.run`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.trainer.loop.pending import PendingWork
from services.trainer.status import TrainerStatus
from shared.queue.records import QueueState
from shared.run.pinned import Flat
from shared.schema import RunConfig
from shared.types import WeightVersion


@dataclass(frozen=True, slots=True)
class StoreContext:
    """Parts of the trainer that a store uses.

    `run_id` returns the run's identifier. `settings` are those that a restored run must agree with.
    """

    config: RunConfig
    address: str
    run_folder: Path
    model_folder: Path
    run_id: Callable[[], str]
    status: TrainerStatus
    settings: Flat


class RunStore(Protocol):
    """Restores an empty folder at the start of the trainer, and then takes what becomes durable."""

    @property
    def needed_step(self) -> int:
        """First step whose commit record the folder must keep, because the store may not have later ones."""
        ...

    async def restore(self, asked: Callable[[], Awaitable[QueueState]]) -> WeightVersion | None:
        """Restore an empty folder; return the restored version. Raises ConfigError, Unavailable and others."""
        ...

    def check_open(self) -> None:
        """Raise Unavailable until the restore is over."""
        ...

    async def follow(self, pending: Callable[[], PendingWork], epoch: int) -> None:
        """Take everything that becomes durable, until `stop`, and then once more. Raises Fenced, ConfigError."""
        ...

    def stop(self) -> None: ...
