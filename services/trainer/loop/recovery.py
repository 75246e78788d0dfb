"""Recovery of a run: restore the newest valid checkpoint, then retrain the logged steps after it.

Parameters and optimizer of the checkpoint must have the checksums that the commit record or metrics.jsonl has for its
step; otherwise an older checkpoint is used. Each logged step is retrained under the settings that it was made with, and
must give the parameters of its commit record. Then no step is undone: published versions stay valid, and changed
settings take effect after the last logged step. If a step differs (another backend or topology), its groups are
unreadable or its record is missing, the lineage branches at the last step that agreed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.trainer.groups.group_buffer import ready_group
from services.trainer.interfaces import TrainerBackend, TrainPlan
from services.trainer.loop.collaborators import Collaborators
from services.trainer.resuming import check_settings
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.errors import ConfigError, DecodeError, NonFinite, WeightsError
from shared.process import telemetry
from shared.run import checksums, commits, pinned
from shared.run.archive import Archive
from shared.run.commits import CommitLog, CommitRecord
from shared.run.folder import RunFolder
from shared.run.ledger import TRAINED
from shared.run.lineage import epoch_of, in_lineage
from shared.run.state import TrainerState
from shared.types import Group, WeightVersion

_log = telemetry.Log("recovery")


@dataclass(frozen=True, slots=True)
class Recovered:
    """A recovered model and the steps that recovery lost.

    `state` belongs to the weights in memory; `checkpoint` is the version that was restored. `undone` are the logged
    steps after `state` that could not be reproduced, oldest first; `lost` are steps whose records are unreadable; `why`
    is the reason.
    """

    state: TrainerState
    checkpoint: WeightVersion
    undone: tuple[WeightVersion, ...] = ()
    lost: tuple[WeightVersion, ...] = ()
    why: str | None = None

    @property
    def n_replayed(self) -> int:
        return self.state.step - self.checkpoint.step


@dataclass(frozen=True, slots=True)
class Divergence:
    """A logged step that could not be reproduced."""

    version: WeightVersion
    why: str


class LoggedSteps:
    """Logged steps along the lineage of `head`."""

    def __init__(self, archive: Archive, log: CommitLog, head: TrainerState) -> None:
        self._archive, self._log, self._head = archive, log, head

    def version(self, step: int) -> WeightVersion:
        epoch = epoch_of(step, self._head.lineage)
        assert epoch is not None
        return WeightVersion(epoch, step)

    def record(self, step: int) -> CommitRecord | None:
        """Read the commit record of a step; None if it is damaged or no longer kept. Raises Unavailable."""
        try:
            return commits.read(self._log.root, self.version(step))
        except WeightsError:
            return None

    def train(self, backend: TrainerBackend, step: int) -> Divergence | None:
        """Retrain a step on the weights before it, under its own settings. Blocks.

        Raises Unavailable, and ConfigError for settings that this version or installation lacks.
        """
        version = self.version(step)
        settings = pinned.in_force(self._head.settings, version.epoch)
        try:
            payloads = self._archive.read(version)
            held = [ready_group(Group.decode(payload), payload, "") for payload in payloads]
            backend.apply_settings(settings)
            backend.step(held, WeightVersion(version.epoch, step - 1))
        except DecodeError as error:
            return Divergence(version, f"its groups cannot be read: {error.detail}")
        except ConfigError as error:
            return Divergence(version, f"its settings cannot be applied again: {error.detail}")
        except NonFinite as error:
            return Divergence(version, str(error))
        record = self.record(step)
        if record is not None and record.checksum != (found := backend.checksum()):
            return Divergence(version, f"the checksum of its parameters is {found}, the log says {record.checksum}")
        return None


class Recovery:
    """Recovers the model for one incarnation, before its epoch begins."""

    def __init__(self, plan: TrainPlan, parts: Collaborators, status: TrainerStatus, waiter: Waiter) -> None:
        self._plan, self._parts, self._status, self._waiter = plan, parts, status, waiter

    async def recover(self) -> Recovered | None:
        """Restore the model as it was after the last logged step; None for a new run.

        Raises ConfigError if the configuration contradicts the run, and WeightsError.
        """
        bound: TrainerState | None = None
        undone, lost, why = tuple[WeightVersion, ...](), tuple[WeightVersion, ...](), None
        while True:
            checkpoint = await self._waiter.retry_until_stopped(
                lambda: self._waiter.blocking(self._parts.backend.restore)
            )
            self._status.set_aside = dict(self._parts.checkpoints.bad)
            if checkpoint is None:
                if await asyncio.to_thread(self._has_log):
                    continue
                await self._build()
                return None
            if bound is None or not _leads_to(checkpoint, bound):
                bound, undone = await asyncio.to_thread(self._head, checkpoint), ()
                lost = await asyncio.to_thread(self._lost, bound)
                why = _describe_lost(lost, self._status.run)
            head = check_settings(bound, self._plan.settings, self._plan.free)
            await self._build()
            if (
                why_not := await self._waiter.retry_until_stopped(lambda c=checkpoint: self._contradicted(c))
            ) is not None:
                self._parts.checkpoints.bad[str(checkpoint.version)] = why_not
                _log.error("checkpoint skipped", version=str(checkpoint.version), reason=why_not)
                continue
            broken = await self._retrain(checkpoint, head)
            if broken is None:
                return Recovered(head, checkpoint.version, undone, lost, why)
            log = LoggedSteps(self._parts.archive, self._parts.commits, head)
            undone = (*(log.version(step) for step in range(broken.version.step, head.step + 1)), *undone)
            why = f"{broken.version} cannot be reproduced: {broken.why}"
            _log.warning("the lineage branches", run=self._status.run, reason=why, undone=len(undone))
            bound = await asyncio.to_thread(_before, log, broken.version.step, checkpoint)

    def _has_log(self) -> bool:
        """True if another trainer has just begun this run, which seemed new.

        Raises WeightsError if there is a log, but no checkpoint to retrain it from.
        """
        record = self._newest_record()
        if record is not None and self._parts.checkpoints.head() is None:
            raise WeightsError(
                f"the log goes up to {record.version}, but there is no checkpoint",
                "restore a checkpoint, or start a run with another name",
            )
        return record is not None

    def newest(self) -> WeightVersion | None:
        """Return the newest durable version, of a checkpoint or of the log."""
        record = self._newest_record()
        found = [self._parts.checkpoints.head(), None if record is None else record.version]
        return max((version for version in found if version is not None), default=None)

    async def _build(self) -> None:
        await self._waiter.blocking(self._parts.backend.build)
        self._status.memory, self._status.plan = self._parts.backend.memory, self._parts.backend.plan

    async def _contradicted(self, checkpoint: TrainerState) -> str | None:
        """Compare the built model with the checksums in the log; return how they differ. Raises Unavailable."""
        logged = await asyncio.to_thread(checksums.witnesses_in, RunFolder(self._parts.commits.root.parent), checkpoint)
        if not logged:
            return None
        why_not = checksums.contradiction(await self._waiter.blocking(self._parts.backend.checksums), logged)
        return None if why_not is None else f"{checkpoint.version}: {why_not}"

    def _head(self, checkpoint: TrainerState) -> TrainerState:
        record = self._newest_record()
        return record.state if record is not None and _leads_to(checkpoint, record.state) else checkpoint

    def _lost(self, head: TrainerState) -> tuple[WeightVersion, ...]:
        """Find steps after `head` that were committed, but whose records are unreadable.

        The ledger, which is written after a record, and the files of the damaged records name them.
        """
        settled = self._parts.ledger.settled().values()
        trained = {WeightVersion(one["epoch"], one["step"]) for one in settled if one["disposition"] == TRAINED}
        made = trained.union(commits.versions(self._parts.commits.root))
        return tuple(sorted(version for version in made if version > head.version and version.step > head.step))

    def _newest_record(self) -> CommitRecord | None:
        root = self._parts.commits.root
        for version in reversed(commits.versions(root)):
            try:
                return commits.read(root, version)
            except WeightsError as error:
                _log.error("commit record skipped", version=str(version), reason=str(error))
        return None

    async def _retrain(self, checkpoint: TrainerState, head: TrainerState) -> Divergence | None:
        """Retrain the logged steps from the checkpoint to `head`; return the first that differs."""
        log = LoggedSteps(self._parts.archive, self._parts.commits, head)
        for step in range(checkpoint.step + 1, head.step + 1):
            self._status.phase, self._status.step = "replaying", step - 1
            broken = await self._waiter.retry_until_stopped(
                lambda step=step: self._waiter.blocking(log.train, self._parts.backend, step)
            )
            if broken is not None:
                return broken
        if head.step > checkpoint.step:
            await self._waiter.blocking(self._parts.backend.apply_settings, self._plan.settings)
            _log.info("log replayed", run=self._status.run, from_step=checkpoint.step, to=str(head.version))
        return None


def _describe_lost(lost: Sequence[WeightVersion], run: str) -> str | None:
    if not lost:
        return None
    why = f"the commit records of {', '.join(map(str, lost))} are unreadable"
    _log.error("the lineage branches", run=run, reason=why, undone=len(lost))
    return why


def _before(log: LoggedSteps, step: int, checkpoint: TrainerState) -> TrainerState:
    """Return the newest logged state before `step`."""
    found = (log.record(one) for one in range(step - 1, checkpoint.step, -1))
    return next((record.state for record in found if record is not None), checkpoint)


def _leads_to(checkpoint: TrainerState, head: TrainerState) -> bool:
    return checkpoint.version <= head.version and in_lineage(checkpoint.version, head.lineage)
