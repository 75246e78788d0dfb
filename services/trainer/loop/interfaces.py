"""What the train loop is made of: the seams to queue, model, files and servers, and how it waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from services.trainer.bucket.run_bucket import RunBucket
from services.trainer.groups.filters import starved
from services.trainer.groups.group_buffer import AdmissionRules, ReadyGroup
from services.trainer.learner.metrics import StepMetrics
from services.trainer.publishing.publications import PublishedVersion
from services.trainer.publishing.publisher import Delivery
from services.trainer.settlement.ledger import LedgerFile, StepLog
from services.trainer.settlement.refusals import Refusals
from services.trainer.status import TrainerStatus
from shared.errors import QueueUnavailable, Unavailable
from shared.outcomes import FilterRule
from shared.process import telemetry
from shared.process.sinks import MetricsFanout
from shared.queue.records import Finished, QueueState, StreamEntry
from shared.run.archive import Archive
from shared.run.checksums import Checksums
from shared.run.commits import CommitLog
from shared.run.pinned import Flat
from shared.run.state import TrainerState
from shared.types import Lineage, WeightVersion

OnNonFinite = Literal["stop", "skip"]
_PAUSE_S, _PAUSE_CAP_S = 0.1, 3.0
_log = telemetry.Log("waiter")


class TrainQueue(Protocol):
    """The trainer's part of `TicketQueue`."""

    async def begin(
        self, low: int, version: int, issued: int, void: int, done: Iterable[int], epoch: int, above: int
    ) -> int: ...

    async def open(self, epoch: int, incarnations: Lineage = (), beginning: str = "") -> None: ...

    async def read(self, epoch: int, consumer: str, count: int, block_ms: int) -> list[StreamEntry]: ...

    async def commit(self, epoch: int, version: int, finished: Sequence[Finished], void: int) -> None: ...

    async def dead_letter(self, epoch: int, entry: StreamEntry, reason: str) -> None: ...

    async def leave(self, epoch: int, refused: str = "") -> None: ...

    async def publish(self, ticket: int, payload: bytes) -> object: ...

    async def state(self) -> QueueState: ...


class Backend(Protocol):
    """The part of `Backend` that the loop drives; every method blocks. `memory` is what training takes, in MiB, and
    `plan` on what; both are known once the model is built. A model that was restored takes steps from then on, a new
    one when it has started.
    """

    @property
    def memory(self) -> Mapping[str, float]: ...

    @property
    def plan(self) -> str: ...

    def restore(self) -> TrainerState | None: ...

    def build(self) -> None: ...

    def start(self, state: TrainerState) -> Path: ...

    def under(self, settings: Flat) -> None:
        """What follows is trained under these settings of a configuration, until `build` brings back its own. Weights
        and optimizer state stay, bit for bit. Raises ConfigError if they cannot be put in force.
        """
        ...

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics: ...

    def checksum(self) -> str:
        """Of the bits of all parameters under training."""
        ...

    def checksums(self) -> Checksums:
        """Of all that a checkpoint of the present weights would hold."""
        ...

    def logprob_diffs(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[float | None]:
        """Of each group the mean |log p(trainer) - log p(rollout)| in nats, over the tokens that the present weights
        sampled; None without any.
        """
        ...

    def rewind(self, version: WeightVersion) -> None: ...

    def take(self, state: TrainerState, base: WeightVersion) -> Callable[[], Path]:
        """What makes a durable checkpoint of the present weights, in any thread and whatever they become meanwhile."""
        ...

    def publish(self, version: WeightVersion) -> PublishedVersion:
        """Chunks of the present weights; servers learn of them by `Collaborators.publish`."""
        ...


class CheckpointStore(Protocol):
    """The part of `CheckpointFolders` that the loop needs to take over a run; every method blocks."""

    bad: dict[str, str]

    def head(self) -> WeightVersion | None: ...

    def fence(self, epoch: int) -> None: ...

    def repair(self) -> None: ...

    def metrics(self) -> Sequence[Mapping[str, Any]]: ...

    def oldest_step(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """`groups_per_step` tickets a step, a checkpoint every `save_interval_steps` and of versions that are evaluated,
    every `eval_every_n_steps`; `grace_s` to end in; `keep_reference` for a KL term.

    `settings` is what of the configuration a checkpoint records (see shared.run.pinned); `original` is what the run was
    started with, for a checkpoint that is older than its settings; `origin` is the version of another run that it
    starts from; `on_nonfinite` is what follows when a step is refused; `env` is the run's main environment.
    """

    max_steps: int
    groups_per_step: int
    save_interval_steps: int
    grace_s: float
    seed: int
    keep_reference: bool
    rules: AdmissionRules
    settings: Flat = field(default_factory=dict[str, Any])
    original: Flat = field(default_factory=dict[str, Any])
    origin: Mapping[str, Any] | None = None
    on_nonfinite: OnNonFinite = "stop"
    env: str = ""
    eval_every_n_steps: int | None = None

    def is_evaluated(self, step: int) -> bool:
        return self.eval_every_n_steps is not None and step % self.eval_every_n_steps == 0

    @property
    def enough(self) -> int:
        """Groups to hold at most, while a step can be made of them: as many as may be under way at once."""
        return (self.rules.max_staleness + 1) * self.groups_per_step

    def starved(self, n_filtered: Mapping[FilterRule, int], step: int) -> str | None:
        """Why the run has to stop, because filters have left no groups for `step`; None if it may go on.

        Where engine and trainer disagree, more than all groups that were under way when it was set right.
        """
        n_batches = self.rules.filters.max_num_gen_batches
        if n_filtered.get("logprob", 0) > self.enough or sum(n_filtered.values()) >= n_batches * self.groups_per_step:
            return starved(n_filtered, step)
        return None


@dataclass(frozen=True, slots=True)
class Collaborators:
    """What the loop works with. `warm_start` ends early when a stop is asked for; `publish` tells the servers of a
    version, `beginning` names the beginning of the run; `bucket` follows the run's folder, if the run has one;
    `has_lost` tells whether the newest version has to be published again; `sinks` get each line of `metrics`.
    """

    backend: Backend
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
    beginning: Callable[[], str]
    bucket: RunBucket | None = None
    has_lost: Callable[[], bool] = lambda: False
    sinks: MetricsFanout = field(default_factory=MetricsFanout)


def _called[*A, R](call: Callable[[*A], R], *args: *A) -> R:
    """A future cannot carry StopIteration: who waits for it would wait for ever."""
    try:
        return call(*args)
    except StopIteration as error:
        raise RuntimeError("an iterator ended too early") from error


class Waiter:
    """Waits for what blocks and for what is away, on behalf of the train loop."""

    def __init__(self, executor: Executor, status: TrainerStatus) -> None:
        self._executor, self._status = executor, status

    async def blocking[*A, R](self, call: Callable[[*A], R], *args: *A) -> R:
        """Runs a blocking call in the one training thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(_called, call, *args))

    async def patiently[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats what is safe to repeat while the other side is away or a disk is full; /status says so, and a stop
        ends it.

        Raises Unavailable after a stop, and any other error at once.
        """
        pause, status, wait = _PAUSE_S, self._status, object()
        try:
            while True:
                try:
                    return await call()
                except Unavailable as error:
                    if status.stopping:
                        raise
                    status.waits[wait] = status.wait_after(error)
                _log.warning("waiting", reason=status.waits[wait].why, retry_s=pause)
                with suppress(TimeoutError):
                    async with status.until_stop():
                        await asyncio.sleep(pause)
                pause = min(_PAUSE_CAP_S, 2 * pause)
        finally:
            status.waits.pop(wait, None)

    async def answer[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """`patiently` for the queue: one that does not answer delays a stop by no more than a second."""
        return await self.patiently(lambda: self.hurriedly(call))

    async def hurriedly[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """The queue's answer. Raises QueueUnavailable if a stop does not leave it the time."""
        try:
            async with self._status.until_stop():
                return await call()
        except TimeoutError as error:
            raise QueueUnavailable("Redis did not answer before the stop") from error
