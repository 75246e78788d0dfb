"""One step: train on its groups while they are archived, then commit.

A step that gives non-finite numbers is never committed: it is recorded as refused and undone in memory. Then either
its tickets end without training, or its tickets reopen and the run stops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from services.trainer.groups.group_buffer import GroupBuffer, ReadyGroup
from services.trainer.interfaces import RunChecks, ServerChecks, TrainPlan
from services.trainer.loop.collaborators import Collaborators
from services.trainer.loop.recovery import LoggedSteps
from services.trainer.loop.refusals import RefusedStep
from services.trainer.loop.settlement import Settlement
from services.trainer.metrics.lines import step_line
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.status import TrainerStatus
from services.trainer.waiter import Waiter
from shared import packages
from shared.errors import NonFinite, WeightsError
from shared.process import telemetry, tracing
from shared.run import checksums
from shared.run.chain import as_read
from shared.run.checkpoint_files import PARAMS
from shared.types import WeightVersion

_MOST_SKIPPED = 3
"""Refused steps in a row that stop the run: the fault is not in their groups."""
_log = telemetry.Log("step")


class StepRunner:
    """Runs the steps of one incarnation.

    Args:
        plan: has the action after a refused step, and the main environment.
        buffer: source of the groups; a refused step reopens its tickets there.
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
        self._n_refused = 0  # refused steps in a row
        self._spot_checks: ServerChecks | None = None
        if plan.checks_servers and not plan.forks:  # the servers of a fork's groups are gone
            checks: RunChecks = packages.part("run_checks")
            self._spot_checks = checks.server_checks(parts.backend, status, waiter, truncated=plan.truncated)

    async def run(self, groups: Sequence[ReadyGroup], wait_s: float) -> dict[str, float] | None:
        """Train the next step on `groups` and commit it.

        Args:
            wait_s: seconds that the loop waited for the groups.

        Returns:
            Seconds that the commit took, by part; None if the step is refused. If the run must stop then,
            `status.refused` has the reason.

        Raises Fenced, and Unavailable after a stop.
        """
        before = self._settlement.pending.version
        after = WeightVersion(before.epoch, before.step + 1)
        about = {"volley.step": after.step, "volley.version": str(after)}
        with tracing.span("step", about, place=tracing.of_step(after.step)) as span:
            tracing.record("wait for groups", tracing.here(), time.time() - wait_s)
            timings = await self._run(groups, wait_s, before, after)
            if timings is None:
                span.fail(f"refused: {self._status.refused or 'skipped'}")
        return timings

    async def _run(
        self, groups: Sequence[ReadyGroup], wait_s: float, before: WeightVersion, after: WeightVersion
    ) -> dict[str, float] | None:
        self._status.phase = "training"
        checked, seconds = await self._check_servers(groups, before)
        started, began = time.perf_counter(), time.time()
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
            self._status.trained(metrics.step, metrics.version, metrics)
            seconds |= {"step": step_s, "wait": wait_s, "archive": archive_s}
            line = self._line_of(metrics, groups, seconds) | checked
            trained, trained_at = time.perf_counter(), time.time()
            found = await self._waiter.blocking(self._parts.backend.checksums)
            line |= {checksums.CHECKSUMS: dict(found)}
            with tracing.span("record"):
                await self._settlement.record(groups, digests, after, line, found[PARAMS])
        recorded = time.perf_counter()
        with tracing.span("commit"):
            await self._settlement.settle(line)
        _trace(groups, after, began, trained_at)
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
        """Train the step; return its metrics, or NonFinite, after which the model in memory is invalid."""
        try:
            with tracing.span("train"):
                return await self._waiter.blocking(self._parts.backend.step, groups, before)
        except NonFinite as error:
            return error

    async def _check_servers(
        self, groups: Sequence[ReadyGroup], before: WeightVersion
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Check the servers of all groups that are here, if the run does; return fields of the line, and seconds."""
        if self._spot_checks is None:
            return {}, {}
        started = time.perf_counter()
        with tracing.span("spot check"):
            found = await self._spot_checks.check([*groups, *self._buffer.waiting], before)
        return as_read(found), {"spot_check": time.perf_counter() - started}

    async def _archive(self, version: WeightVersion, groups: Sequence[ReadyGroup]) -> tuple[list[str], float]:
        """Archive the groups while they are trained on; return their digests and the seconds it took."""
        started = time.perf_counter()
        payloads = [g.payload for g in groups]
        with tracing.span("archive"):
            digests = await self._waiter.retry_until_stopped(
                lambda: asyncio.to_thread(self._parts.archive.write, version, payloads)
            )
        return digests, time.perf_counter() - started

    def _line_of(
        self, metrics: StepMetrics, groups: Sequence[ReadyGroup], seconds: Mapping[str, float]
    ) -> dict[str, Any]:
        """Observe the step's times and make its line of metrics.jsonl."""
        for part, took in seconds.items():
            self._status.timed(part, took)
        mask_truncated = self._plan.rules.filters.mask_truncated
        line = step_line(metrics, [one.group for one in groups], seconds, self._plan.env, mask_truncated=mask_truncated)
        return line if self._parts.log is None else line | self._parts.log.of_line()

    async def _refuse(
        self, error: NonFinite, before: WeightVersion, groups: Sequence[ReadyGroup], digests: Sequence[str]
    ) -> None:
        """Record a refused step and undo it in memory.

        Then its tickets end without training, or they reopen and the run stops. Several refused steps in a row always
        stop it.
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
        await self._waiter.retry_until_stopped(lambda: asyncio.to_thread(parts.refusals.keep, refusal))
        await self._go_back()
        if skip:
            await self._settlement.refuse(groups, digests, before, refusal.reason)
            return
        for one in groups:
            self._buffer.progress.reopen(one.group.ticket)
        sentence = refusal.sentence(parts.refusals.folder)
        await self._waiter.call_queue(lambda: parts.queue.leave(before.epoch, sentence))
        status.refused = sentence

    async def _go_back(self) -> None:
        """Bring the model back to the state before the step, bit for bit.

        Restores the newest durable checkpoint and retrains the archived steps since then.
        """
        parts, pending = self._parts, self._settlement.pending
        await self._waiter.retry_until_stopped(lambda: self._waiter.blocking(parts.backend.rewind, pending.saved))
        log = LoggedSteps(parts.archive, parts.commits, pending.state)
        for step in range(pending.saved.step + 1, pending.version.step + 1):
            if (broken := await self._waiter.blocking(log.train, parts.backend, step)) is not None:
                raise WeightsError(f"{broken.version} cannot be reproduced: {broken.why}")
        await self._waiter.blocking(parts.backend.apply_settings, self._plan.settings)


def _trace(groups: Sequence[ReadyGroup], version: WeightVersion, began: float, trained: float) -> None:
    """Record a step in the traces of its tickets. Args: began, trained: times as time.time() gives."""
    about, step = {"volley.step": version.step, "volley.version": str(version)}, tracing.of_step(version.step)
    for one in groups:
        place = tracing.of_ticket(one.group.ticket)
        tracing.record("train", place, began, trained, about, step)
        tracing.record("commit", place, trained, attributes=about, link=step)
