"""One incarnation of the trainer, from an empty process to its end.

Startup: recover the weights of the last logged step (or warm start a new model), take over the queue under a new epoch,
repair the files after a crash, make the start of the epoch durable and publish its weights. Then the train loop
runs until a stop, which lets the running step end and makes a checkpoint of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from services.trainer import lifecycle
from services.trainer.interfaces import TrainPlan
from services.trainer.loop.collaborators import Collaborators
from services.trainer.loop.recovery import Recovered, Recovery
from services.trainer.loop.train_loop import TrainLoop
from services.trainer.publishing.publisher import HandoverPublisher
from services.trainer.status import TrainerStatus
from services.trainer.step_log import FencedLog
from services.trainer.waiter import Waiter
from shared.errors import DecodeError, Fenced, Unavailable
from shared.process import telemetry, tracing
from shared.queue.records import QueueState
from shared.run import commits, protected_files
from shared.run.folder import RunFolder
from shared.run.state import TrainerState, initial_state
from shared.types import Group, WeightVersion

_EPOCH_ATTEMPTS = 5
_log = telemetry.Log("worker")


class TrainerWorker:
    """Worker task of the trainer service."""

    def __init__(self, plan: TrainPlan, parts: Collaborators, status: TrainerStatus) -> None:
        self._plan, self._parts, self._status = plan, parts, status
        self._waiter = Waiter(parts.executor, status)
        self._recovery = Recovery(plan, parts, status, self._waiter)
        self._epoch: int | None = None  # this incarnation's, once the queue is open

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            Fenced: a newer trainer has taken over.
            VolleyError: any other error that ends a run, such as an unreadable model or checkpoint.
        """
        await lifecycle.run(self._life, self._status, self._plan.grace_s, self._leave)

    async def _leave(self) -> None:
        """Tell the queue that this stop is not a crash caused by the groups held. Best effort."""
        epoch = self._epoch
        if epoch is None:
            return
        try:
            await self._waiter.call_queue_once(lambda: self._parts.queue.leave(epoch, self._status.refused or ""))
        except (Unavailable, Fenced) as error:
            _log.warning("cannot tell the queue about the stop", reason=str(error))

    async def _life(self, group: asyncio.TaskGroup) -> None:
        status, parts = self._status, self._parts
        await self._restore_folder()
        found = await self._recovery.recover()
        if found is None:
            status.phase = "warm start"
            await parts.warm_start()
        if status.stopping:
            return
        found, state = await self._take_over(found)
        await self._waiter.retry_until_stopped(lambda: asyncio.to_thread(self._repair, found, state.epoch))
        saved = await self._waiter.retry_until_stopped(lambda: self._waiter.blocking(self._start, found, state))
        status.step, status.epoch, status.version = state.step, state.epoch, str(state.version)
        status.durable(state.step)
        status.saved(saved.step)
        _log.info("started", run=status.run, version=status.version, resumed=found is not None)
        publisher = HandoverPublisher(
            parts.publish, FencedLog(parts.handovers, parts.archive, state.epoch), status, group
        )
        published = await self._waiter.retry_until_stopped(
            lambda: self._waiter.blocking(parts.backend.publish, state.version)
        )
        publisher.start(published, {})
        await TrainLoop(self._plan, parts, status, self._waiter, state, saved, publisher).run()
        await self._leave()
        status.phase = "stopped"

    async def _restore_folder(self) -> None:
        """Restore the run's folder from its bucket, if the folder is empty."""
        if (bucket := self._parts.bucket) is None:
            return

        def asked() -> Awaitable[QueueState]:
            return self._waiter.call_queue(self._parts.queue.state)

        if (version := await self._waiter.retry_until_stopped(lambda: bucket.restore(asked))) is not None:
            known = await asked()
            self._status.branched = (
                f"the run's folder was empty and was restored from the bucket at {version}:"
                f" {max(0, known.version - version.step)} later steps that the queue knows of are undone,"
                " and tickets that ended after it are issued again"
            )
            _log.warning("the lineage branches", run=self._status.run, reason=self._status.branched)

    def _start(self, found: Recovered | None, state: TrainerState) -> WeightVersion:
        """Make the start of the epoch durable; return the newest checkpoint.

        Writes a checkpoint, or only a commit record if steps were replayed.
        """
        parts = self._parts
        if found is None or not found.n_replayed:
            parts.backend.start(state)
            return state.version
        parts.commits.append(state, parts.backend.checksum())
        return found.checkpoint

    async def _take_over(self, found: Recovered | None) -> tuple[Recovered | None, TrainerState]:
        """Fence all older trainers; return the recovery and the state at the start of this epoch.

        Until it is fenced, an older trainer may make more steps durable. Then this one recovers again, from those; it
        opens the queue only once there are none, so other services never see the run go back.
        """
        run_id = await self._waiter.retry_until_stopped(lambda: asyncio.to_thread(self._parts.run_id))
        tracing.follow(self._status.run, run_id)
        for _ in range(_EPOCH_ATTEMPTS):
            if not await asyncio.to_thread(self._is_newest, found):  # starting from an older step would lose groups
                found = await self._recovery.recover()
            self._status.phase = "starting"
            known = await asyncio.to_thread(self._with_ended_tickets, found)
            epoch = await self._begin(known)
            if not await self._claim(epoch):
                continue
            if (
                await asyncio.to_thread(self._is_newest, found)
                and await asyncio.to_thread(self._with_ended_tickets, found) == known
            ):
                begun = await asyncio.to_thread(self._state_of_epoch, known, epoch)
                await self._waiter.call_queue(
                    lambda epoch=epoch, begun=begun: self._parts.queue.open(epoch, begun.lineage, run_id)
                )
                self._epoch = epoch
                if found is not None and (found.undone or found.lost):
                    self._status.branched = found.why
                    await self._requeue_undone(found, known)
                return found, begun
        raise Unavailable("other trainers of this run keep starting at the same time", "stop all trainers but one")

    async def _claim(self, epoch: int) -> bool:
        """Claim the epoch and fence older trainers; False if another trainer has it.

        After this no older trainer commits a step or makes a checkpoint. Raises Fenced if a later epoch was claimed:
        its trainer may not have seen this one's drafts.
        """
        parts, waiter = self._parts, self._waiter
        if not await waiter.retry_until_stopped(lambda: asyncio.to_thread(parts.archive.claim, epoch)):
            return False
        await waiter.retry_until_stopped(lambda: asyncio.to_thread(parts.commits.fence, epoch))
        await waiter.retry_until_stopped(lambda: asyncio.to_thread(parts.checkpoints.fence, epoch))
        await asyncio.to_thread(parts.archive.check_newest, epoch)
        return True

    async def _requeue_undone(self, found: Recovered, known: TrainerState) -> None:
        """Publish the groups of undone steps to the queue again, which has forgotten them.

        They are admitted like any other group. Tickets of groups that cannot be read are issued again.
        """
        progress = known.progress()
        for version in (*found.undone, *found.lost):
            with suppress(DecodeError):
                for payload in await asyncio.to_thread(lambda version=version: list(self._parts.archive.read(version))):
                    ticket = Group.decode(payload).ticket
                    if not progress.is_finished(ticket):
                        await self._waiter.call_queue(lambda t=ticket, p=payload: self._parts.queue.publish(t, p))

    def _is_newest(self, found: Recovered | None) -> bool:
        """True if no other trainer has made a newer step or checkpoint durable."""
        newest = self._recovery.newest()
        known = None if found is None else max([found.state.version, *found.undone])
        if newest == known:
            return True
        _log.warning("another trainer has gone further", version=str(newest))
        return False

    def _state_of_epoch(self, known: TrainerState, epoch: int) -> TrainerState:
        """State at the start of this epoch; a run whose `max_steps` was raised is no longer done."""
        plan = self._plan
        state = known.starting_epoch(
            epoch, keep_reference=plan.keep_reference, settings=plan.settings, origin=plan.origin, forks=plan.forks
        )
        state = replace(state, phase="done" if state.step >= plan.max_steps else "rl")
        files, rewritten = protected_files.at_start(RunFolder(self._parts.archive.root.parent), state.files)
        begun = state.with_files(files, rewritten)
        if begun.losses != known.losses:
            _log.warning("lines of the run's files are gone or changed", run=self._status.run, found=begun.losses)
        return begun

    async def _begin(self, known: TrainerState) -> int:
        above = await asyncio.to_thread(self._parts.archive.last_epoch)
        progress = (known.low, known.step, known.issued, known.void, known.done)
        return await self._waiter.call_queue(lambda: self._parts.queue.begin(*progress, known.epoch, above))

    def _with_ended_tickets(self, found: Recovered | None) -> TrainerState:
        return self._parts.ledger.with_ended_tickets(found.state if found else initial_state(self._plan.seed))

    def _repair(self, found: Recovered | None, epoch: int) -> None:
        """Bring the files in line with the recovered state, once older trainers, which write to them, are fenced.

        Lines of trainers after `epoch` stay: another one may have taken over. Raises Fenced once that is seen.
        """
        parts, state = self._parts, found.state if found else initial_state(self._plan.seed)
        check = partial(parts.archive.check_newest, epoch)
        parts.checkpoints.repair()
        parts.ledger.repair(state, epoch, check)
        lost = [*state.metrics, *commits.metrics(parts.commits.root), *parts.checkpoints.metrics()]
        parts.metrics.repair(state, epoch, lost, check=check)
        parts.handovers.repair(state, epoch, check=check)
