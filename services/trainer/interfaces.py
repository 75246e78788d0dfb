"""Protocols of the train loop's queue, model and checkpoints, and the plan of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from services.trainer.groups.filters import starved
from services.trainer.groups.group_buffer import AdmissionRules, ReadyGroup
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.publishing.publications import PublishedVersion
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.data_schema import DataSection
from shared.outcomes import FilterRule
from shared.queue.records import Finished, QueueState, StreamEntry
from shared.run.checksums import Checksums
from shared.run.folder import Record, RunFolder
from shared.run.lineage import ForkPoint
from shared.run.pinned import Flat
from shared.run.state import TrainerState
from shared.types import Lineage, WeightVersion

OnNonFinite = Literal["stop", "skip"]
type RecordCheck = Callable[[Sequence[bytes], Sequence[bytes]], Awaitable[None]]
"""Gets the new and the present lines of a record, and raises InputError for a new line that is refused."""


class TrainQueue(Protocol):
    """Methods of `TicketQueue` that the trainer calls."""

    async def begin(
        self, low: int, version: int, issued: int, void: int, done: Iterable[int], epoch: int, above: int
    ) -> int: ...

    async def open(self, epoch: int, incarnations: Lineage = (), run_id: str = "") -> None: ...

    async def read(self, epoch: int, consumer: str, count: int, block_ms: int) -> list[StreamEntry]: ...

    async def commit(self, epoch: int, version: int, finished: Sequence[Finished], void: int) -> None: ...

    async def dead_letter(self, epoch: int, entry: StreamEntry, reason: str) -> None: ...

    async def leave(self, epoch: int, refused: str = "") -> None: ...

    async def publish(self, ticket: int, payload: bytes) -> object: ...

    async def state(self) -> QueueState: ...


class TrainerBackend(Protocol):
    """The model as the loop drives it; every method blocks.

    `memory` is the memory that training takes, in MiB by part; `plan` describes mesh, devices and micro-batches. Both
    are known once the model is built. A restored model can train after `build`, a new one after `start`.
    """

    @property
    def memory(self) -> Mapping[str, float]: ...

    @property
    def plan(self) -> str: ...

    def restore(self) -> TrainerState | None: ...

    def build(self) -> None: ...

    def start(self, state: TrainerState) -> Path: ...

    def apply_settings(self, settings: Flat) -> None:
        """Train the next steps under these settings, until `build` restores the configuration's own.

        Weights and optimizer state do not change. Raises ConfigError if the settings cannot be applied.
        """
        ...

    def compile(self) -> None:
        """Compile what is known of the next steps; nothing changes. Called once, while the first groups are made."""
        ...

    def step(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics: ...

    def checksum(self) -> str:
        """Checksum of the bits of all trained parameters."""
        ...

    def checksums(self) -> Checksums:
        """Checksums of everything that a checkpoint of the present weights would hold."""
        ...

    def logprob_diffs(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[float | None]:
        """Mean |log p(trainer) - log p(rollout)| of each group, in nats.

        Only tokens that the present weights sampled count; None for a group without such tokens.
        """
        ...

    def spot_check(self, held: Sequence[ReadyGroup], present: WeightVersion) -> list[Any]:
        """Return the result of `EpisodeScorer.compare` on a share of the groups' episodes."""
        ...

    def effective_share(self, held: Sequence[ReadyGroup], present: WeightVersion) -> float:
        """Effective share of the groups' tokens under the present weights (see `Policy.effective_share`)."""
        ...

    def rewind(self, version: WeightVersion) -> None: ...

    def take(self, state: TrainerState, base: WeightVersion) -> Callable[[], Path]:
        """Copy the present weights; the returned function writes them as a durable checkpoint.

        It may run in any thread while training goes on.
        """
        ...

    def publish(self, version: WeightVersion) -> PublishedVersion:
        """Write the chunks of the present weights. `Collaborators.publish` then notifies the servers."""
        ...


class EpisodeScorer(Protocol):
    """Scores episodes again, exactly, with the weights that sampled them.

    `learner` has the present weights, which do not change.
    """

    def keep(self, version: WeightVersion, learner: Any) -> None:
        """Copy the weights, which a step is about to change."""
        ...

    def forget(self) -> None:
        """Drop the copy: the present weights are not those of the step after it."""
        ...

    def compare(self, held: Sequence[ReadyGroup], share: float, present: WeightVersion, learner: Any) -> list[Any]:
        """Compare servers on a share of the episodes: tokens of the present weights and of those before the step."""
        ...


class ServerChecks(Protocol):
    """Finds servers that compute something else than the weights they name."""

    async def check(self, groups: Sequence[ReadyGroup], present: WeightVersion) -> dict[str, Any]:
        """Check the groups that were not here before; return fields for the step's line of metrics."""
        ...


class RunChecks(Protocol):
    """The part `run_checks`."""

    def check_log(self, checkpoint: Path) -> None:
        """Compare a checkpoint with the log of its run. Raises WeightsError if they differ, Unavailable."""
        ...

    def of_records(
        self, folder: RunFolder, run: str, data: DataSection, versions: Callable[[str], Awaitable[object]]
    ) -> Mapping[Record, RecordCheck]:
        """Return the checks of lines that are handed over; `versions` raises NotFound for an unknown environment."""
        ...

    def episode_scorer(self, model: Any, scorer: Any, temperature: float, layout: Any) -> EpisodeScorer: ...

    def server_checks(
        self, backend: TrainerBackend, status: TrainerStatus, waiter: Waiter, *, truncated: bool
    ) -> ServerChecks: ...


class CheckpointStore(Protocol):
    """Methods of `CheckpointFolders` that the loop calls to take over a run; every method blocks."""

    bad: dict[str, str]

    def head(self) -> WeightVersion | None: ...

    def fence(self, epoch: int) -> None: ...

    def repair(self) -> None: ...

    def metrics(self) -> Sequence[Mapping[str, Any]]: ...

    def oldest_step(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """Plain values that the train loop needs from the configuration.

    A checkpoint is made every `save_interval_steps` and of each evaluated version (every `eval_every_n_steps`). A stop
    waits at most `grace_s` seconds. `keep_reference` keeps a reference model for a KL term.

    `settings` are the settings that a checkpoint records (see shared.run.pinned); `origin` is the version of another
    run that this run starts from; `on_nonfinite` is the action after a non-finite step; `env` is the main environment.
    `forks` are the logs that a fork trains from; `free` are prefixes of settings that it may change at its beginning.
    `checks_servers`: some episodes are scored again, to check the servers; `truncated`: these sample from a part of
    the vocabulary.
    """

    max_steps: int
    groups_per_step: int
    save_interval_steps: int
    grace_s: float
    seed: int
    keep_reference: bool
    rules: AdmissionRules
    settings: Flat = field(default_factory=dict[str, Any])
    origin: Mapping[str, Any] | None = None
    on_nonfinite: OnNonFinite = "stop"
    env: str = ""
    eval_every_n_steps: int | None = None
    forks: tuple[ForkPoint, ...] = ()
    free: tuple[str, ...] = ()
    checks_servers: bool = False
    truncated: bool = False

    def is_evaluated(self, step: int) -> bool:
        return self.eval_every_n_steps is not None and step % self.eval_every_n_steps == 0

    @property
    def enough(self) -> int:
        """Most groups to hold while a step can be made of them: as many as may be in flight at once."""
        return (self.rules.max_staleness + 1) * self.groups_per_step

    def starved(self, n_filtered: Mapping[FilterRule, int], step: int) -> str | None:
        """Reason to stop because filters left no groups for `step`; None if the run may go on.

        The limit of the log-probability filter is `enough`: all groups that may have been in flight when the
        disagreement of engine and trainer was repaired.
        """
        n_batches = self.rules.filters.max_num_gen_batches
        if n_filtered.get("logprob", 0) > self.enough or sum(n_filtered.values()) >= n_batches * self.groups_per_step:
            return starved(n_filtered, step)
        return None
