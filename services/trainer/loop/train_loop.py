"""Main loop of the trainer: take groups, train, publish, make checkpoints, stop.

Every step does its writes in this order: archive the groups, write the commit record, write the ledger, commit to the
queue (fenced), publish the weights. Each write is durable before the next begins. After a crash between two writes, the
next start does the missing ones from record and ledger. Checkpoints only shorten the replay of this log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from services.trainer.groups.group_buffer import GroupBuffer, ReadyGroup
from services.trainer.interfaces import TrainPlan
from services.trainer.loop.checkpointer import Checkpointer
from services.trainer.loop.collaborators import Collaborators
from services.trainer.loop.group_reader import GroupReader
from services.trainer.loop.settlement import Settlement
from services.trainer.loop.step_runner import StepRunner
from services.trainer.publishing.publisher import HandoverPublisher
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.errors import Unavailable
from shared.process import telemetry
from shared.run.state import TrainerState
from shared.run.waits import Wait
from shared.types import WeightVersion

_log = telemetry.Log("train_loop")


class TrainLoop:
    """Trains until the last step, from a queue that is already open.

    Args:
        state: durable state when this process starts to train.
        saved: the newest durable checkpoint, which has the weights of `state` or those of an ancestor.
    """

    def __init__(
        self,
        plan: TrainPlan,
        parts: Collaborators,
        status: TrainerStatus,
        waiter: Waiter,
        state: TrainerState,
        saved: WeightVersion,
        publisher: HandoverPublisher,
    ) -> None:
        self._plan, self._parts, self._status, self._waiter, self._publisher = plan, parts, status, waiter, publisher
        self._buffer = GroupBuffer(state.progress(), state.lineage, plan.rules, state.forks)
        self._settlement = Settlement(parts, self._buffer, status, waiter, state, saved, plan.max_steps)
        self._reader = GroupReader(plan, parts.queue, state.epoch, self._buffer, self._settlement, status, waiter)
        self._compared = state.version, set[int]()  # tickets whose log-probabilities agree with this version
        self._runner = StepRunner(plan, parts, self._buffer, self._settlement, status, waiter)

    async def run(self) -> None:
        """Train until a stop. Raises Fenced.

        After the last step or a refused one, the reader keeps checking the queue. If Redis was wiped, the reader writes
        the last step there again, for the services that wait for it.
        """
        async with asyncio.TaskGroup() as group:
            self._checkpointer = Checkpointer(
                self._plan, self._parts, self._settlement, self._status, self._waiter, group
            )
            reading = group.create_task(self._reader.run())
            bucket, pending = self._parts.bucket, self._settlement.pending
            if bucket is not None:
                group.create_task(bucket.follow(lambda: self._settlement.pending, pending.state.epoch))
            await self._train()
            await self._wait_for_stop()
            reading.cancel()
            if bucket is not None:
                bucket.stop()

    async def _train(self) -> None:
        """Train, then write the last checkpoint, even if queue or disk were unavailable at the stop."""
        try:
            await self._steps()
        except* Unavailable as errors:
            if not self._status.stopping:
                raise
            _log.warning("stopped while waiting", step=self._status.step, reason=str(errors.exceptions[0]))
        if self._settlement.pending.n_unsaved:
            await self._write_last_checkpoint()

    async def _steps(self) -> None:
        """Take the groups of a step, train on them, publish the weights; until the last step or a stop."""
        status, plan, settlement = self._status, self._plan, self._settlement
        if settlement.pending.version.step < plan.max_steps and not status.stopping:
            await self._waiter.blocking(self._parts.backend.compile)
        waiting_since = time.perf_counter()
        while settlement.pending.version.step < plan.max_steps and not status.stopping and not status.refused:
            is_ready = await self._log_allows_step()
            if status.log_ended is not None:
                return
            groups = await self._take() if is_ready and not status.paused else None
            if groups is not None:
                timings = await self._runner.run(groups, time.perf_counter() - waiting_since)
                if timings is not None:
                    await self._publish(timings, [one.group.ticket for one in groups])
            if self._checkpointer.is_due:
                await self._checkpointer.begin()
            status.checkpoint_wanted = False
            if groups is None:
                await self._wait_for_groups()
            else:
                waiting_since = time.perf_counter()

    async def _log_allows_step(self) -> bool:
        """True unless this is a fork whose log has no groups for the next step now; sets `status.log_ended`."""
        if (log := self._parts.log) is None:
            return True
        is_exhausted = log.is_exhausted()  # first: then the buffer has all of its groups
        groups, present = self._next_groups(), self._settlement.pending.version
        self._status.log_ended = await self._waiter.blocking(log.ended, groups, present, is_exhausted)
        return bool(groups)

    async def _take(self) -> list[ReadyGroup] | None:
        """Drop stale groups, then take the groups of the next step; None if some are missing."""
        async with self._settlement.exclusive:
            await self._settlement.drop(self._buffer.expire(self._settlement.pending.version.step))
            await self._drop_mismatched()
            taken = self._buffer.take(self._plan.groups_per_step)
        self._reader.groups_taken()
        return taken

    async def _drop_mismatched(self) -> None:
        """Drop groups of the next step if the engine's log-probabilities differ from the trainer's.

        They differ if the engine serves other weights than it reports. Each group is compared once per version.
        """
        bound, present = self._plan.rules.filters.max_logprob_diff, self._settlement.pending.version
        if present != self._compared[0]:
            self._compared = present, set()
        agree = self._compared[1]
        while bound is not None and (new := [g for g in self._next_groups() if g.group.ticket not in agree]):
            diffs = await self._waiter.blocking(self._parts.backend.logprob_diffs, new, present)
            found = {g.group.ticket: diff for g, diff in zip(new, diffs, strict=True)}
            agree |= {ticket for ticket, diff in found.items() if diff is None or diff <= bound}
            await self._settlement.drop(
                [
                    self._buffer.filter(ticket, "logprob", _describe_difference(diff, bound, present))
                    for ticket, diff in found.items()
                    if ticket not in agree
                ]
            )

    def _next_groups(self) -> list[ReadyGroup]:
        return self._buffer.ahead(self._plan.groups_per_step)

    async def _stop_if_starved(self) -> bool:
        """Stop the run if filters rejected too many groups; return True if it stops."""
        why = self._plan.starved(self._buffer.n_filtered, self._settlement.pending.version.step + 1)
        if why is not None:
            _log.error("filters left no groups to train on", run=self._status.run, reason=why)
            epoch = self._settlement.pending.version.epoch
            await self._waiter.call_queue(lambda: self._parts.queue.leave(epoch, why))
            self._status.refused = why
        return why is not None

    async def _wait_for_groups(self) -> None:
        """Wait for a change of the buffer or the status; publish the newest version again if its chunks are lost."""
        if self._parts.has_lost():
            _log.warning("chunks of the newest version are lost, publishing it again", run=self._status.run)
            await self._publish({})
            return
        if await self._stop_if_starved():
            return
        status = self._status
        status.phase = "paused" if status.paused else "waiting"
        groups = f"groups: {self._buffer.n_waiting} of {self._plan.groups_per_step} have arrived"
        with nullcontext() if status.paused else status.waiting(Wait("orchestrator", groups)):
            await status.changed.wait()
        status.changed.clear()

    async def _publish(self, timings: Mapping[str, float], tickets: Sequence[int] = ()) -> None:
        """Publish the committed version; the rollout servers load it while the next step runs.

        `tickets` are those of its step.
        """
        backend, version = self._parts.backend, self._settlement.pending.version
        published = await self._waiter.retry_until_stopped(lambda: self._waiter.blocking(backend.publish, version))
        self._publisher.start(published, timings, tickets)

    async def _write_last_checkpoint(self) -> None:
        """Write the last checkpoint: after a stop, or after the last step."""
        try:
            await self._checkpointer.complete()
        except Unavailable as error:
            if not self._status.stopping:
                raise
            status = self._status
            _log.warning(
                "last checkpoint not written, the next start replays the log",
                step=status.step,
                checkpoint_step=status.checkpoint_step,
                reason=str(error),
            )

    async def _wait_for_stop(self) -> None:
        status = self._status
        while not status.stopping:
            status.phase = "refused" if status.refused else "done"
            await status.changed.wait()
            status.changed.clear()


def _describe_difference(diff: float | None, bound: float, present: WeightVersion) -> str:
    return f"mean |Δ log p| {diff:.3g} nats on tokens of {present}, above trainer.filters.logprob={bound:g}"
