"""From an empty process to the end of the log: the newest whole checkpoint is restored, and what the log holds after it
is trained again.

Parameters and optimizer of the checkpoint must have the checksums that the log tells of its step, in the commit record
or in metrics.jsonl, else an older checkpoint is used. Every step is trained again under the settings that were in force
when it was made, and must give the parameters that its own record tells. Then nothing was undone: versions that were
published stay what they were, and other settings begin after the last one. Where one differs (another backend or
topology), its groups cannot be read or its record is gone, the lineage branches at the last step that agreed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.trainer.groups.group_buffer import ready_group
from services.trainer.interfaces import Backend, TrainPlan
from services.trainer.loop.collaborators import Collaborators
from services.trainer.resuming import under_settings
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.errors import ConfigError, DecodeError, NonFinite, WeightsError
from shared.process import telemetry
from shared.run import checksums, commits, pinned
from shared.run.archive import Archive
from shared.run.commits import CommitLog, CommitRecord
from shared.run.folder import RunFolder
from shared.run.ledger import TRAINED
from shared.run.state import TrainerState, epoch_of, in_lineage
from shared.types import Group, WeightVersion

_log = telemetry.Log("recovery")


@dataclass(frozen=True, slots=True)
class Recovered:
    """`state` is that of the weights in memory, `checkpoint` what they were made from. `undone` are the logged steps
    after `state` that could not be made again, oldest first, `lost` those whose records are gone, and `why`.
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
    """A logged step that does not come out as it was."""

    version: WeightVersion
    why: str


class LoggedSteps:
    """The steps of the log along the lineage of `head`."""

    def __init__(self, archive: Archive, log: CommitLog, head: TrainerState) -> None:
        self._archive, self._log, self._head = archive, log, head

    def version(self, step: int) -> WeightVersion:
        epoch = epoch_of(step, self._head.lineage)
        assert epoch is not None
        return WeightVersion(epoch, step)

    def record(self, step: int) -> CommitRecord | None:
        """None if it is damaged, or older than the retained ones. Raises Unavailable."""
        try:
            return commits.read(self._log.root, self.version(step))
        except WeightsError:
            return None

    def train(self, backend: Backend, step: int) -> Divergence | None:
        """Trains the step again, on the weights before it, under its settings. Blocks. Raises Unavailable."""
        version = self.version(step)
        try:
            payloads = self._archive.read(version)
            held = [ready_group(Group.decode(payload), payload, "") for payload in payloads]
            backend.under(pinned.in_force(self._head.settings, version.epoch))
            backend.step(held, WeightVersion(version.epoch, step - 1))
        except DecodeError as error:
            return Divergence(version, f"its groups cannot be read: {error.detail}")
        except ConfigError as error:
            return Divergence(version, f"its settings cannot be put in force again: {error.detail}")
        except NonFinite as error:
            return Divergence(version, str(error))
        record = self.record(step)
        if record is not None and record.checksum != (found := backend.checksum()):
            return Divergence(version, f"the checksum of its parameters is {found}, the log says {record.checksum}")
        return None


class Recovery:
    """Of one incarnation, before its epoch begins."""

    def __init__(self, plan: TrainPlan, parts: Collaborators, status: TrainerStatus, waiter: Waiter) -> None:
        self._plan, self._parts, self._status, self._waiter = plan, parts, status, waiter

    async def recover(self) -> Recovered | None:
        """The model as it was after the last logged step; None for a new one. Raises ConfigError if the run is not that
        of this configuration, and WeightsError.
        """
        bound: TrainerState | None = None
        undone, lost, why = tuple[WeightVersion, ...](), tuple[WeightVersion, ...](), None
        while True:
            checkpoint = await self._waiter.patiently(lambda: self._waiter.blocking(self._parts.backend.restore))
            self._status.set_aside = dict(self._parts.checkpoints.bad)
            if checkpoint is None:
                if await asyncio.to_thread(self._has_log):
                    continue
                await self._build()
                return None
            if bound is None or not _leads_to(checkpoint, bound):
                bound, undone = await asyncio.to_thread(self._head, checkpoint), ()
                lost = await asyncio.to_thread(self._lost, bound)
                why = _gone(lost, self._status.run)
            head = under_settings(bound, self._plan.settings, self._plan.original)
            await self._build()
            if (why_not := await self._waiter.patiently(lambda c=checkpoint: self._contradicted(c))) is not None:
                self._parts.checkpoints.bad[str(checkpoint.version)] = why_not
                _log.error("checkpoint passed over", version=str(checkpoint.version), reason=why_not)
                continue
            broken = await self._retrain(checkpoint, head)
            if broken is None:
                return Recovered(head, checkpoint.version, undone, lost, why)
            log = LoggedSteps(self._parts.archive, self._parts.commits, head)
            undone = (*(log.version(step) for step in range(broken.version.step, head.step + 1)), *undone)
            why = f"{broken.version} cannot be made again: {broken.why}"
            _log.warning("the lineage branches", run=self._status.run, reason=why, undone=len(undone))
            bound = await asyncio.to_thread(_before, log, broken.version.step, checkpoint)

    def _has_log(self) -> bool:
        """Whether another trainer has just begun the run that seemed new. Raises WeightsError if there is a log, but no
        checkpoint to train it from.
        """
        record = self._newest_record()
        if record is not None and self._parts.checkpoints.head() is None:
            raise WeightsError(
                f"the log goes up to {record.version}, but there is no checkpoint",
                "restore one, or start a run with another name",
            )
        return record is not None

    def newest(self) -> WeightVersion | None:
        """The newest durable version there is now, of a checkpoint or of the log."""
        record = self._newest_record()
        found = [self._parts.checkpoints.head(), None if record is None else record.version]
        return max((version for version in found if version is not None), default=None)

    async def _build(self) -> None:
        await self._waiter.blocking(self._parts.backend.build)
        self._status.memory, self._status.plan = self._parts.backend.memory, self._parts.backend.plan

    async def _contradicted(self, checkpoint: TrainerState) -> str | None:
        """Objection of the log to what was built from the checkpoint. Raises Unavailable."""
        told = await asyncio.to_thread(checksums.told_in, RunFolder(self._parts.commits.root.parent), checkpoint)
        if not told:
            return None
        why_not = checksums.contradiction(await self._waiter.blocking(self._parts.backend.checksums), told)
        return None if why_not is None else f"{checkpoint.version}: {why_not}"

    def _head(self, checkpoint: TrainerState) -> TrainerState:
        record = self._newest_record()
        return record.state if record is not None and _leads_to(checkpoint, record.state) else checkpoint

    def _lost(self, head: TrainerState) -> tuple[WeightVersion, ...]:
        """The steps after `head` that were made: by the ledger, which is written after their records, or by what is
        left of these.
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
                _log.error("commit record passed over", version=str(version), reason=str(error))
        return None

    async def _retrain(self, checkpoint: TrainerState, head: TrainerState) -> Divergence | None:
        """What the log holds from the checkpoint to `head`, a step at a time."""
        log = LoggedSteps(self._parts.archive, self._parts.commits, head)
        for step in range(checkpoint.step + 1, head.step + 1):
            self._status.phase, self._status.step = "replaying", step - 1
            broken = await self._waiter.patiently(
                lambda step=step: self._waiter.blocking(log.train, self._parts.backend, step)
            )
            if broken is not None:
                return broken
        if head.step > checkpoint.step:
            await self._waiter.blocking(self._parts.backend.under, self._plan.settings)
            _log.info("log replayed", run=self._status.run, from_step=checkpoint.step, to=str(head.version))
        return None


def _gone(lost: Sequence[WeightVersion], run: str) -> str | None:
    if not lost:
        return None
    why = f"{', '.join(map(str, lost))} cannot be gone on from: the steps were made, but their records are unreadable"
    _log.error("the lineage branches", run=run, reason=why, undone=len(lost))
    return why


def _before(log: LoggedSteps, step: int, checkpoint: TrainerState) -> TrainerState:
    """The newest state that the log tells of before `step`."""
    found = (log.record(one) for one in range(step - 1, checkpoint.step, -1))
    return next((record.state for record in found if record is not None), checkpoint)


def _leads_to(checkpoint: TrainerState, head: TrainerState) -> bool:
    return checkpoint.version <= head.version and in_lineage(checkpoint.version, head.lineage)
