"""One incarnation of the trainer, from an empty process to its end.

Open: restore the newest checkpoint (or warm start a new model), take over the queue under a new epoch, repair what a
crash left in the files, and make and publish the first checkpoint of that epoch. Then the train loop, until a stop: it
lets the running step end and saves what is not durable.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from services.trainer.loop import lifecycle
from services.trainer.loop.interfaces import Collaborators, TrainPlan, Waiter
from services.trainer.loop.publisher import HandoverPublisher
from services.trainer.loop.resuming import under_settings
from services.trainer.loop.train_loop import TrainLoop
from services.trainer.settlement.ledger import FencedLog
from services.trainer.status import TrainerStatus
from shared.errors import Fenced, Unavailable
from shared.process import telemetry
from shared.run.state import TrainerState, initial_state

_BEGINNINGS = 5
_log = telemetry.Log("worker")


class TrainerWorker:
    """The service's worker."""

    def __init__(self, plan: TrainPlan, parts: Collaborators, status: TrainerStatus) -> None:
        self._plan, self._parts, self._status = plan, parts, status
        self._waiter = Waiter(parts.executor, status)
        self._epoch: int | None = None  # of our own, once the queue is open

    async def run(self) -> None:
        """Works until it is cancelled.

        Raises:
            Fenced: a newer trainer has taken over.
            VolleyError: what else ends a run: a model or a checkpoint that cannot be loaded.
        """
        await lifecycle.run(self._life, self._status, self._plan.grace_s, self._leave)

    async def _leave(self) -> None:
        """Tells the queue that this is no crash: groups that we held did not cause it. Best effort."""
        epoch = self._epoch
        if epoch is None:
            return
        try:
            await self._waiter.hurriedly(lambda: self._parts.queue.leave(epoch, self._status.refused or ""))
        except (Unavailable, Fenced) as error:
            _log.warning("the queue was not told of the stop", reason=str(error))

    async def _life(self, group: asyncio.TaskGroup) -> None:
        status, parts = self._status, self._parts
        found = await self._restore()
        if found is None:
            status.phase = "warm start"
            await parts.warm_start()
        if status.stopping:
            return
        found, state = await self._take_over(found)
        await self._waiter.patiently(lambda: asyncio.to_thread(self._repair, found, state.epoch))
        await self._waiter.patiently(lambda: self._waiter.blocking(parts.backend.start, state))
        status.step, status.epoch, status.version = state.step, state.epoch, str(state.version)
        status.durable(state.step)
        _log.info("started", run=status.run, version=status.version, resumed=found is not None)
        publisher = HandoverPublisher(
            parts.publish, FencedLog(parts.handovers, parts.archive, state.epoch), status, group
        )
        published = await self._waiter.patiently(lambda: self._waiter.blocking(parts.backend.publish, state.version))
        publisher.start(published, {})
        await TrainLoop(self._plan, parts, status, self._waiter, state, publisher).run()
        await self._leave()
        status.phase = "stopped"

    async def _restore(self) -> TrainerState | None:
        """The model of the newest checkpoint, or a new one. Raises ConfigError if the run is not that of this
        configuration.
        """
        found = await self._waiter.patiently(lambda: self._waiter.blocking(self._parts.backend.restore))
        self._status.set_aside = dict(self._parts.checkpoints.bad)
        found = under_settings(found, self._plan.settings, self._plan.original) if found else None
        await self._waiter.blocking(self._parts.backend.build)
        self._status.memory = self._parts.backend.memory
        return found

    async def _take_over(self, found: TrainerState | None) -> tuple[TrainerState | None, TrainerState]:
        """Fences all older trainers; returns the newest checkpoint's state, whose model is restored, and that of our
        own epoch.

        Until it is fenced, an older trainer may have made steps durable that we don't know of. Then we begin again,
        from these; the queue opens only when there are none, so that nobody sees the run go back and come again.
        """
        self._status.phase = "starting"
        for _ in range(_BEGINNINGS):
            if not self._is_newest(found):  # to begin from an older one, or from none, would forget groups
                found = await self._restore()
            known = await asyncio.to_thread(self._known, found)
            epoch = await self._begin(known)
            if not await self._claim(epoch):
                continue
            if self._is_newest(found) and await asyncio.to_thread(self._known, found) == known:
                await self._waiter.answer(lambda epoch=epoch: self._parts.queue.open(epoch))
                self._epoch = epoch
                return found, self._begun(known, epoch)
        raise Unavailable("other trainers of this run begin at the same time", "let one of them work")

    async def _claim(self, epoch: int) -> bool:
        """Whether the epoch is ours. From here on no older trainer makes a checkpoint: what we see of theirs is all
        there will be. Raises Fenced if a later epoch was claimed, whose trainer may not have seen our drafts.
        """
        archive, checkpoints, waiter = self._parts.archive, self._parts.checkpoints, self._waiter
        if not await waiter.patiently(lambda: asyncio.to_thread(archive.claim, epoch)):
            return False
        await waiter.patiently(lambda: asyncio.to_thread(checkpoints.fence, epoch))
        await asyncio.to_thread(archive.check_newest, epoch)
        return True

    def _is_newest(self, found: TrainerState | None) -> bool:
        """Whether no other trainer has made a newer checkpoint."""
        newest = self._parts.checkpoints.head()
        if newest == (found.version if found else None):
            return True
        _log.warning("another trainer has made a newer checkpoint", version=str(newest))
        return False

    def _begun(self, known: TrainerState, epoch: int) -> TrainerState:
        """The state at the start of this epoch; a run whose last step has moved on is no longer done."""
        plan = self._plan
        state = known.under(epoch, keep_reference=plan.keep_reference, settings=plan.settings, origin=plan.origin)
        return replace(state, phase="done" if state.step >= plan.max_steps else "rl")

    async def _begin(self, known: TrainerState) -> int:
        above = await asyncio.to_thread(self._parts.archive.last_epoch)
        progress = (known.low, known.step, known.issued, known.void, known.done)
        return await self._waiter.answer(lambda: self._parts.queue.begin(*progress, known.epoch, above))

    def _known(self, found: TrainerState | None) -> TrainerState:
        return self._parts.ledger.known(found or initial_state(self._plan.seed))

    def _repair(self, found: TrainerState | None, epoch: int) -> None:
        """Files in line with the checkpoint that we go on from. Not before: until they are fenced, older trainers write
        to them.

        What trainers after `epoch` wrote stays: we may be replaced by now. Raises Fenced where that is seen.
        """
        parts, state = self._parts, found or initial_state(self._plan.seed)
        check = partial(parts.archive.check_newest, epoch)
        parts.checkpoints.repair()
        parts.ledger.repair(state, epoch, check)
        parts.metrics.repair(state, epoch, [*state.metrics, *parts.checkpoints.metrics()], check=check)
        parts.handovers.repair(state, epoch, check=check)
