"""Objects that the train loop works with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.interfaces import CheckpointStore, TrainerBackend, TrainQueue
from services.trainer.loop.ledger import LedgerFile
from services.trainer.loop.refusals import Refusals
from services.trainer.loop.run_store import RunStore
from services.trainer.publishing.publications import PublishedVersion
from services.trainer.publishing.publisher import Delivery
from services.trainer.step_log import StepLog
from shared.process.sinks import MetricsFanout
from shared.run.archive import Archive
from shared.run.commits import CommitLog
from shared.types import WeightVersion


class TrainingBounds(Protocol):
    """Bounds of a fork, which trains from another run's log; `is_exhausted` once the buffer has every group of it."""

    @property
    def is_exhausted(self) -> Callable[[], bool]: ...

    def ended(self, groups: Sequence[ReadyGroup], present: WeightVersion, is_exhausted: bool) -> str | None:
        """Return the reason why training ends before the step on these groups; None if it goes on. Blocks."""
        ...

    def of_line(self) -> dict[str, Any]:
        """Return fields for a line of metrics, of the groups that `ended` last saw."""
        ...


@dataclass(frozen=True, slots=True)
class Collaborators:
    """Objects that the train loop works with.

    `warm_start` returns early if a stop is asked for. `publish` notifies the servers of a version. `run_id` returns the
    run's identifier. `bucket` copies the run's folder to its bucket, if it has one. `has_lost` is true if the newest
    version must be published again. `sinks` get each line of `metrics`. `log` bounds a fork, which trains from another
    run's log.
    """

    backend: TrainerBackend
    checkpoints: CheckpointStore
    queue: TrainQueue
    ledger: LedgerFile
    archive: Archive
    commits: CommitLog
    metrics: StepLog
    handovers: StepLog
    refusals: Refusals
    executor: Executor
    warm_start: Callable[[], Awaitable[None]]
    publish: Callable[[PublishedVersion], Awaitable[Sequence[Delivery]]]
    run_id: Callable[[], str]
    bucket: RunStore | None = None
    has_lost: Callable[[], bool] = lambda: False
    sinks: MetricsFanout = field(default_factory=MetricsFanout)
    log: TrainingBounds | None = None
