"""Protocols between the train loop and queue, model and checkpoints, and the plan of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from services.trainer.groups.filters import starved
from services.trainer.groups.group_buffer import AdmissionRules, ReadyGroup
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.publishing.publications import PublishedVersion
from shared.outcomes import FilterRule
from shared.queue.records import Finished, QueueState, StreamEntry
from shared.run.checksums import Checksums
from shared.run.pinned import Flat
from shared.run.state import TrainerState
from shared.types import Lineage, WeightVersion

OnNonFinite = Literal["stop", "skip"]


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
