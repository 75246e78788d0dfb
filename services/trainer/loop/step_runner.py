"""One step: its groups are archived while the model trains on them, and it counts when both are done.

A step that gives numbers that are not finite never counts: it is put on record and undone in memory, and its tickets
end without training, or are open again and the run stops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from services.trainer.groups.group_buffer import GroupBuffer, ReadyGroup
from services.trainer.interfaces import TrainPlan
from services.trainer.loop.collaborators import Collaborators
from services.trainer.loop.recovery import LoggedSteps
from services.trainer.loop.refusals import RefusedStep
from services.trainer.loop.settlement import Settlement
from services.trainer.metrics.lines import step_line
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared.errors import NonFinite, WeightsError
from shared.process import telemetry
from shared.run import checksums
from shared.run.checkpoint_files import PARAMS
from shared.types import WeightVersion

_MOST_SKIPPED = 3
"""So many refused steps in a row stop the run: it is not their groups that are wrong."""
_log = telemetry.Log("step")


class StepRunner:
    """The steps of one incarnation.

    Args:
        plan: says what follows when a step is refused, and which environment is the main one.
        buffer: where the groups came from; it learns which tickets are open again.
    """

    def __init__(
        self,
        plan: TrainPlan,
        parts: Collaborators,
        buffer: GroupBuffer,
        settlement: Settlement,
        status: TrainerStatus,
        waiter: Waiter,
    ) -> None:
        self._plan, self._parts, self._buffer = plan, parts, buffer
        self._settlement, self._status, self._waiter = settlement, status, waiter
        self._n_refused = 0  # steps in a row, without a good one between

    async def run(self, groups: Sequence[ReadyGroup], wait_s: float) -> dict[str, float] | None:
        """Trains the next step on `groups`, which were waited for so many seconds, and commits it; the seconds that its
        commit took. None if the step is refused; where the run has to stop then, `status.refused` says why. Raises
        Fenced, and Unavailable after a stop.
        """
        started, before = time.perf_counter(), self._settlement.pending.version
        after = WeightVersion(before.epoch, before.step + 1)
        self._status.phase = "training"
        with self._settlement.unrecorded(g.group.ticket for g in groups):
            async with asyncio.TaskGroup() as group:
                archived = group.create_task(self._archive(after, groups))
                metrics = await self._train(groups, before)
            step_s = time.perf_counter() - started
            digests, archive_s = archived.result()
            if isinstance(metrics, NonFinite):
                await self._refuse(metrics, before, groups, digests)
                return None
            self._n_refused = 0
            self._status.trained(metrics)
            line = self._line_of(metrics, groups, {"step": step_s, "wait": wait_s, "archive": archive_s})
            trained = time.perf_counter()
            found = await self._waiter.blocking(self._parts.backend.checksums)
            line |= {checksums.CHECKSUMS: dict(found)}
            await self._settlement.record(groups, digests, after, line, found[PARAMS])
        recorded = time.perf_counter()
        await self._settlement.settle(line)
        timings = {"record_s": recorded - trained, "commit_s": time.perf_counter() - recorded}
        self._status.timed("record", timings["record_s"])
        _log.info(
            "step",
            run=self._status.run,
            step=metrics.step,
            version=metrics.version,
            loss=metrics.loss,
            reward=metrics.reward_mean,
        )
        return timings

    async def _train(self, groups: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics | NonFinite:
        """What came of the step; after an error of this kind the model is of no use any more."""
        try:
            return await self._waiter.blocking(self._parts.backend.step, groups, before)
        except NonFinite as error:
            return error

    async def _archive(self, version: WeightVersion, groups: Sequence[ReadyGroup]) -> tuple[list[str], float]:
        """Digests of the archived groups, and the seconds it took, beside the training of the same groups."""
        started = time.perf_counter()
        payloads = [g.payload for g in groups]
        digests = await self._waiter.patiently(lambda: asyncio.to_thread(self._parts.archive.write, version, payloads))
        return digests, time.perf_counter() - started

    def _line_of(
        self, metrics: StepMetrics, groups: Sequence[ReadyGroup], seconds: Mapping[str, float]
    ) -> dict[str, Any]:
        """The step's line of metrics.jsonl; its times are observed."""
        for part, took in seconds.items():
            self._status.timed(part, took)
        return step_line(metrics, [one.group for one in groups], seconds, self._plan.env)

    async def _refuse(
        self, error: NonFinite, before: WeightVersion, groups: Sequence[ReadyGroup], digests: Sequence[str]
    ) -> None:
        """The step is put on record, and undone in memory. Then its tickets end without training; or they are open
        again, and the run stops: always after several such steps in a row.
        """
        status, parts = self._status, self._parts
        status.not_finite()
        self._n_refused += 1
        skip = self._plan.on_nonfinite == "skip" and self._n_refused < _MOST_SKIPPED
        refusal = RefusedStep.of(error, before, groups, digests, "skip" if skip else "stop")
        _log.error(
            "step refused",
            run=status.run,
            version=refusal.version,
            what=refusal.what,
            tickets=refusal.tickets,
            action=refusal.action,
        )
        await self._waiter.patiently(lambda: asyncio.to_thread(parts.refusals.keep, refusal))
        await self._go_back()
        if skip:
            await self._settlement.refuse(groups, digests, before, refusal.reason)
            return
        for one in groups:
            self._buffer.progress.reopen(one.group.ticket)
        sentence = refusal.sentence(parts.refusals.folder)
        await self._waiter.answer(lambda: parts.queue.leave(before.epoch, sentence))
        status.refused = sentence

    async def _go_back(self) -> None:
        """The model as it was before the step, bit for bit: the newest durable checkpoint, and the steps since then
        trained again, as archived.
        """
        parts, pending = self._parts, self._settlement.pending
        await self._waiter.patiently(lambda: self._waiter.blocking(parts.backend.rewind, pending.saved))
        log = LoggedSteps(parts.archive, parts.commits, pending.state)
        for step in range(pending.saved.step + 1, pending.version.step + 1):
            if (broken := await self._waiter.blocking(log.train, parts.backend, step)) is not None:
                raise WeightsError(f"{broken.version} cannot be made again: {broken.why}")
        await self._waiter.blocking(parts.backend.under, self._plan.settings)
