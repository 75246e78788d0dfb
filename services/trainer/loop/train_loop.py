"""The steps of one incarnation of the trainer: take groups, train, checkpoint, commit, publish.

Order of one hand-over, which crash safety rests on: groups archived, then checkpoint durable, then ledger durable, then
queue commit (fenced), then publish. A crash between any two is repaired at the next start from the checkpoint and the
ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.trainer.learner.metrics import StepMetrics
from services.trainer.loop.group_buffer import DroppedGroup, GroupBuffer, ReadyGroup, ready_group
from services.trainer.loop.interfaces import Collaborators, TrainPlan, Waiter
from services.trainer.loop.ledger import StepLog
from services.trainer.loop.refusals import RefusedStep
from services.trainer.status import TrainerStatus
from shared.errors import Fenced, NonFinite, Unavailable
from shared.process import telemetry
from shared.process.wedge import Wait
from shared.queue.records import Finished
from shared.run import ledger
from shared.run.chain import Chain, as_read
from shared.run.ledger import NONFINITE, TRAINED
from shared.run.state import TrainerState
from shared.types import Group, WeightVersion

_CONSUMER = "trainer"
_READ_COUNT = 32
_READ_BLOCK_MS = 1000
_ATTEND_S = 2.0
_MOST_SKIPPED = 3
"""So many refused steps in a row stop the run: it is not their groups that are wrong."""
_log = telemetry.Log("course")


class TrainLoop:
    """From a queue of our own to the last step.

    Args:
        state: at the start of this incarnation; its checkpoint is durable.
        group: where publishing goes on beside training.
    """

    def __init__(
        self, plan: TrainPlan, parts: Collaborators, board: TrainerStatus, state: TrainerState, group: asyncio.TaskGroup
    ) -> None:
        self._plan, self._parts, self._board, self._start, self._group = plan, parts, board, state, group
        self._waiter = Waiter(parts.executor, board)
        self._intake = GroupBuffer(state.progress(), state.lineage, plan.rules)
        self._books = (
            asyncio.Lock()
        )  # held while tickets end, so that a checkpoint never knows of one that the ledger does not
        self._unrecorded = (
            0  # effects that are in memory and not yet in archive or ledger: there is no checkpoint of such a state
        )
        self._room = asyncio.Event()
        self._pending: list[tuple[Finished, dict[str, Any]]] = []
        self._base = state.version
        self._chain = state.chain or Chain(state.step)
        self._lines: list[
            dict[str, Any]
        ] = []  # of metrics, that no checkpoint carries and the file may not durably hold
        self._skipped = 0  # steps in a row, without a good one between

    async def follow(self) -> None:
        """Returns when a stop was asked for and met. Raises Fenced.

        After the last step, or one that was refused, the queue is still attended to: if it is wiped, those who wait
        must learn of the last step again.
        """
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read())
            await self._train()
            await self._linger()
            reader.cancel()
        await self._leave()

    async def publish(self, folder: Path, timings: Mapping[str, float]) -> None:
        """Sends a durable checkpoint to the servers and records how long each part of the hand-over took."""
        started = time.perf_counter()
        deliveries = await self._parts.publish(folder)
        seconds = time.perf_counter() - started
        self._board.timed("publish", seconds)
        handover = {
            "step": WeightVersion.parse(folder.name).step,
            "version": folder.name,
            **timings,
            "publish_s": seconds,
        }
        self._board.last_handover = handover | {"servers": [asdict(delivery) for delivery in deliveries]}
        await self._note(self._parts.handovers, self._board.last_handover)

    async def _read(self) -> None:
        """Moves entries from the queue to the intake while there is room, until a stop."""
        while not self._board.stopping:
            with suppress(Unavailable):  # patience ends only with a stop
                await (self._attend() if self._has_enough() else self._receive())

    def _has_enough(self) -> bool:
        """What is held makes a step, and more of it would be of no use before that step. (A missing ticket is always
        waited for.)
        """
        plan = self._plan
        return self._board.phase in ("done", "refused") or (
            self._intake.n_waiting >= plan.enough and self._intake.has(plan.groups_per_step)
        )

    async def _receive(self) -> None:
        queue, epoch = self._parts.queue, self._start.epoch
        count = max(1, min(_READ_COUNT, self._plan.enough - self._intake.n_waiting))
        entries = await self._waiter.answer(lambda: queue.read(epoch, _CONSUMER, count, _READ_BLOCK_MS))
        async with self._books:
            await self._end(await self._intake.receive(entries))
        self._board.waiting_groups = self._intake.n_waiting
        self._board.changed.set()

    async def _attend(self) -> None:
        """Takes nothing in for a while, but learns whether the queue is still ours. Raises Fenced."""
        self._room.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ATTEND_S):
                await self._room.wait()
        async with self._books:
            await self._commit([])

    async def _train(self) -> None:
        """Steps, then the checkpoint of a stop, also when the stop came while queue or disk were away."""
        try:
            await self._steps()
        except* Unavailable as errors:
            if not self._board.stopping:
                raise
            _log.warning("stopped while waiting", step=self._board.step, reason=str(errors.exceptions[0]))
        if self._board.step > self._board.durable_step:
            await self._last_checkpoint()

    async def _linger(self) -> None:
        board = self._board
        while not board.stopping:
            board.phase = "refused" if board.refused else "done"
            await board.changed.wait()
            board.changed.clear()

    async def _leave(self) -> None:
        """Tells the queue that this is no crash: groups that we held did not cause it. Best effort."""
        try:
            await self._waiter.hurriedly(lambda: self._parts.queue.leave(self._start.epoch, self._board.refused or ""))
        except (Unavailable, Fenced) as error:
            _log.warning("left without a word", reason=str(error))

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Inside, what tickets have done to memory is written down. If that fails, there is no checkpoint of it any
        more.
        """
        self._unrecorded += 1
        yield
        self._unrecorded -= 1

    async def _steps(self) -> None:
        board, plan = self._board, self._plan
        waited = time.perf_counter()
        while board.step < plan.max_steps and not board.stopping and not board.refused:
            held = None if board.paused else await self._take()
            if held is not None:
                await self._step(held, time.perf_counter() - waited)
            unsaved = board.step - board.durable_step
            if unsaved and (
                unsaved >= plan.save_interval_steps or board.checkpoint_wanted or board.step == plan.max_steps
            ):
                await self._checkpoint()
            board.checkpoint_wanted = False
            if held is None:
                await self._wait()
            else:
                waited = time.perf_counter()

    async def _last_checkpoint(self) -> None:
        """Of a stop. Once it is durable, a queue that is away learns of it at the next start."""
        try:
            await self._checkpoint()
        except Unavailable as error:
            board = self._board
            _log.warning(
                "the rest is left to the next start",
                step=board.step,
                durable_step=board.durable_step,
                reason=str(error),
            )

    async def _take(self) -> list[ReadyGroup] | None:
        async with self._books:
            await self._end(self._intake.expire(self._board.step))
            taken = self._intake.take(self._plan.groups_per_step)
        self._room.set()
        return taken

    async def _wait(self) -> None:
        board = self._board
        board.phase = "paused" if board.paused else "waiting"
        groups = f"groups: {self._intake.n_waiting} of {self._plan.groups_per_step} are here"
        with nullcontext() if board.paused else board.waiting(Wait("orchestrator", groups)):
            await board.changed.wait()
        board.changed.clear()

    async def _step(self, held: list[ReadyGroup], wait_s: float) -> None:
        board, started = self._board, time.perf_counter()
        board.phase = "training"
        before, after = WeightVersion(board.epoch, board.step), WeightVersion(board.epoch, board.step + 1)
        with self._recorded():
            async with asyncio.TaskGroup() as group:
                archived = group.create_task(self._archive(after, held))
                metrics = await self._made(held, before)
            step_s = time.perf_counter() - started
            digests, archive_s = archived.result()
            if isinstance(metrics, NonFinite):
                await self._refuse(metrics, before, held, digests)
                return
            self._skipped = 0
            trained = [_trained(h, after, digest) for h, digest in zip(held, digests, strict=True)]
        board.trained(metrics)
        board.timed("step", step_s)
        board.timed("wait", wait_s)
        board.timed("archive", archive_s)
        rate = metrics.tokens / (step_s + wait_s)
        seconds = {"step_s": round(step_s, 4), "wait_s": round(wait_s, 4), "archive_s": round(archive_s, 4)}
        line = as_read(asdict(metrics) | {"time": time.time(), **seconds, "tokens_per_sec": round(rate, 1)})
        self._pending += [(h.finished, one) for h, one in zip(held, trained, strict=True)]
        self._lines.append(line)
        self._chain = self._chain.trained(trained, line)
        await self._note(self._parts.metrics, line)
        _log.info(
            "step",
            run=board.run,
            step=metrics.step,
            version=metrics.version,
            loss=metrics.loss,
            reward=metrics.reward_mean,
        )

    async def _made(self, held: Sequence[ReadyGroup], before: WeightVersion) -> StepMetrics | NonFinite:
        """What came of the step; after an error of this kind the model is of no use any more."""
        try:
            return await self._waiter.blocking(self._parts.backend.step, held, before)
        except NonFinite as error:
            return error

    async def _refuse(
        self, error: NonFinite, before: WeightVersion, held: Sequence[ReadyGroup], digests: Sequence[str]
    ) -> None:
        """The step is put on record, and undone in memory. Then its tickets end without training; or they are open
        again, and the run stops: always after several such steps in a row.
        """
        board, parts = self._board, self._parts
        board.not_finite()
        self._skipped += 1
        skip = self._plan.on_nonfinite == "skip" and self._skipped < _MOST_SKIPPED
        refusal = RefusedStep.of(error, before, held, digests, "skip" if skip else "stop")
        _log.error(
            "step refused",
            run=board.run,
            version=refusal.version,
            what=refusal.what,
            tickets=refusal.tickets,
            action=refusal.action,
        )
        await self._waiter.patiently(lambda: asyncio.to_thread(parts.refusals.keep, refusal))
        await self._go_back(before)
        if skip:
            await self._give_up(held, digests, before, refusal.reason)
            return
        for one in held:
            self._intake.progress.reopen(one.group.ticket)
        sentence = refusal.sentence(parts.refusals.folder)
        await self._waiter.answer(lambda: parts.queue.leave(board.epoch, sentence))
        board.refused = sentence

    async def _go_back(self, to: WeightVersion) -> None:
        """The model as it was, bit for bit: the newest durable checkpoint, and the steps since then trained again, as
        archived.
        """
        parts, entries = self._parts, iter([one.entry_id or "" for one, _ in self._pending])
        await self._waiter.patiently(lambda: self._waiter.blocking(parts.backend.rewind, self._base))
        for step in range(self._board.durable_step, to.step):
            version = WeightVersion(to.epoch, step + 1)
            payloads = await asyncio.to_thread(lambda version=version: list(parts.archive.read(version)))
            again = [ready_group(Group.decode(payload), payload, next(entries)) for payload in payloads]
            await self._waiter.blocking(parts.backend.step, again, WeightVersion(to.epoch, step))

    async def _give_up(
        self, held: Sequence[ReadyGroup], digests: Sequence[str], at: WeightVersion, reason: str
    ) -> None:
        """Ends the tickets of a refused step: ledger first, then the queue."""
        async with self._books:
            lines = [
                ledger.line(h.group.ticket, NONFINITE, at, versions=(h.oldest, h.newest), reason=reason, digest=digest)
                for h, digest in zip(held, digests, strict=True)
            ]
            await self._write(lines)
            self._chain = self._chain.ended(lines)
            self._intake.progress.void += len(held)
            await self._commit([h.finished for h in held])
        for _ in held:
            self._board.ended(NONFINITE)

    async def _note(self, log: StepLog, line: Mapping[str, Any]) -> None:
        """Raises Fenced instead, if another trainer has begun: it has put these files in order. The queue would say so,
        but later.
        """
        await asyncio.to_thread(self._parts.archive.check_newest, self._start.epoch)
        log.append(line)

    async def _archive(self, version: WeightVersion, held: Sequence[ReadyGroup]) -> tuple[list[str], float]:
        """Digests of the archived groups, and the seconds it took, beside the training of the same groups."""
        started = time.perf_counter()
        payloads = [h.payload for h in held]
        digests = await self._waiter.patiently(lambda: asyncio.to_thread(self._parts.archive.write, version, payloads))
        return digests, time.perf_counter() - started

    async def _checkpoint(self) -> None:
        """Durable, then the ledger, then the queue; publishing goes on beside the next step."""
        board, parts, started = self._board, self._parts, time.perf_counter()
        board.phase = "saving"
        async with self._books:
            if self._unrecorded:
                raise Unavailable("what the last groups did is not written down")
            state = self._snapshot()
        folder = await self._waiter.patiently(lambda: self._waiter.blocking(parts.backend.save, state, self._base))
        saved = time.perf_counter()
        async with self._books:
            await self._write(state.recent)
            finished = [one for one, _ in self._pending]
            board.durable(board.step)
            await self._commit(finished)
        for _ in finished:
            board.ended(TRAINED)
        self._pending, self._base = [], state.version
        await asyncio.to_thread(parts.archive.check_newest, board.epoch)
        if await asyncio.to_thread(parts.metrics.flush):
            self._lines = []
        timings = {"save_s": saved - started, "commit_s": time.perf_counter() - saved}
        board.timed("save", timings["save_s"])
        self._group.create_task(self.publish(folder, timings))

    def _snapshot(self) -> TrainerState:
        progress, step = self._intake.progress, self._board.step
        return self._start.at(
            step,
            progress,
            issued=max(self._start.issued, self._intake.highest),
            done=step == self._plan.max_steps,
            chain=self._chain,
            recent=tuple(line for _, line in self._pending),
            metrics=tuple(self._lines),
        )

    async def _end(self, voids: Sequence[DroppedGroup]) -> None:
        """Ends tickets without training: ledger first, then the queue. Called with the books held."""
        if not voids:
            return
        board = self._board
        at = WeightVersion(board.epoch, board.step)
        lines = [ledger.line(v.entry.ticket, v.reason, at, versions=v.versions, reason=v.detail) for v in voids]
        with self._recorded():
            await self._write(lines)
            self._chain = self._chain.ended(lines)
        for void in voids:
            board.ended(void.reason)
            _log.warning(
                "ticket ended without training", ticket=void.entry.ticket, reason=void.reason, detail=void.detail
            )
            if void.reason == "poison":
                await self._waiter.answer(lambda v=void: self._parts.queue.dead_letter(board.epoch, v.entry, v.detail))
        await self._commit([void.finished for void in voids])

    async def _commit(self, finished: Sequence[Finished]) -> None:
        board, void = self._board, self._intake.progress.void
        await self._waiter.answer(lambda: self._parts.queue.commit(board.epoch, board.durable_step, finished, void))

    async def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        await self._waiter.patiently(lambda: asyncio.to_thread(self._parts.ledger.append, lines))


def _trained(held: ReadyGroup, version: WeightVersion, digest: str) -> dict[str, Any]:
    return ledger.line(held.group.ticket, TRAINED, version, versions=(held.oldest, held.newest), digest=digest)
