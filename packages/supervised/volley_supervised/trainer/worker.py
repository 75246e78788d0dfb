"""One incarnation of a supervised run (mode sft, dpo), from an empty process to its end. It has files, no queue.

Startup: read the data, restore the newest checkpoint, claim an epoch, repair the files after a crash. Then the loop
makes the first checkpoint of that epoch and trains.

Invariants: a checkpoint's step determines the next examples, so a killed run continues bit for bit as an uninterrupted
one; a run resumes with the same tokens or not at all; each step has one line in sft.jsonl.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from services.trainer import lifecycle
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.resuming import check_settings
from services.trainer.status import TrainerStatus
from services.trainer.step_log import FencedLog, StepLog
from services.trainer.waiter import Waiter
from shared.errors import ConfigError
from shared.process import telemetry
from shared.process.sinks import MetricsFanout
from shared.run import protected_files
from shared.run.archive import Archive
from shared.run.folder import RunFolder
from shared.run.state import TrainerState, initial_state
from volley_supervised.conversations.data import RunData
from volley_supervised.trainer.loop import Backend, SupervisedLoop, SupervisedPlan

type OpenedBackend = tuple[Backend, CheckpointFolders]
_SHOWN = 16
_log = telemetry.Log("supervised")


@dataclass(frozen=True, slots=True)
class SupervisedParts:
    """Objects that the worker works with.

    `data` reads and tokenizes, before the backend is opened. `archive` only holds claims of epochs. `sinks` get each
    line of `log`.
    """

    open_backend: Callable[[], OpenedBackend]
    archive: Archive
    log: StepLog
    executor: Executor
    data: Callable[[Waiter], Awaitable[RunData]]
    sinks: MetricsFanout = field(default_factory=MetricsFanout)


class SupervisedWorker:
    """Worker task of a supervised trainer."""

    def __init__(self, plan: SupervisedPlan, parts: SupervisedParts, status: TrainerStatus) -> None:
        self._plan, self._parts, self._status = plan, parts, status
        self._waiter = Waiter(parts.executor, status)

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            Fenced: a newer trainer has taken over.
            VolleyError: any other error that ends a run, such as an unreadable file, model or checkpoint.
        """
        await lifecycle.run(self._life, self._status, self._plan.grace_s, _do_nothing)

    async def _life(self, _group: asyncio.TaskGroup) -> None:
        status, parts, waiter = self._status, self._parts, self._waiter
        data = await parts.data(waiter)
        _log.info("data", **data.counts())
        backend, checkpoints = await waiter.blocking(parts.open_backend)
        found = await waiter.retry_until_stopped(lambda: waiter.blocking(backend.restore))
        status.set_aside = dict(checkpoints.bad)
        found = self._continued(found, data) if found else None
        await waiter.blocking(backend.build)
        if status.stopping:
            return
        status.phase = "starting"
        state = await self._begin_epoch(found, checkpoints)
        last = await waiter.blocking(backend.open, data.train.examples)
        _log.info("started", run=status.run, version=str(state.version), resumed=found is not None)
        log = FencedLog(parts.log, parts.archive, state.epoch)
        loop = SupervisedLoop(self._plan, backend, log, parts.sinks, status, waiter, data, state, last)
        await loop.run(resumed=found is not None)

    def _continued(self, found: TrainerState, data: RunData) -> TrainerState:
        """Check the restored state; raise ConfigError if configuration or data contradict it."""
        was = found.data or {}
        if was.get("digest") != data.digest:
            why = _changed(was.get("files"), data.files)
            raise ConfigError(
                f"the conversations are not those that the run was begun with: {why}",
                "restore the files, or start a run with another name from these weights: model.path=RUN@VERSION",
            )
        return check_settings(found, self._plan.settings)

    async def _begin_epoch(self, found: TrainerState | None, checkpoints: CheckpointFolders) -> TrainerState:
        """Claim an epoch, fence older trainers and repair the files; return the state at the epoch's start."""
        archive, plan, known = self._parts.archive, self._plan, found or initial_state(self._plan.seed)
        while True:
            epoch = 1 + max(known.epoch, await asyncio.to_thread(archive.last_epoch))
            if await self._waiter.retry_until_stopped(partial(asyncio.to_thread, archive.claim, epoch)):
                break
        await self._waiter.retry_until_stopped(partial(asyncio.to_thread, self._repair, known, epoch, checkpoints))
        files = await asyncio.to_thread(protected_files.at_start, RunFolder(archive.root.parent), known.files)
        state = known.starting_epoch(
            epoch, keep_reference=plan.keep_reference, settings=plan.settings, origin=plan.origin
        )
        return state.with_files(*files)

    def _repair(self, known: TrainerState, epoch: int, checkpoints: CheckpointFolders) -> None:
        checkpoints.fence(epoch)
        checkpoints.repair()
        check = partial(self._parts.archive.check_newest, epoch)
        self._parts.log.repair(known, epoch, [*known.metrics, *checkpoints.metrics()], check=check)


def _changed(was: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """Describe which file has changed, by path and digest."""
    if not was:
        return "other files, tokenizer or chat template"
    for path, digest in now.items():
        if path in was and was[path] != digest:
            return f"{path} has changed: its digest is {digest[:_SHOWN]}, it was {was[path][:_SHOWN]}"
    if sorted(was.values()) == sorted(now.values()):
        return "the files are the same, but their order, the tokenizer, the chat template or Volley's version differs"
    gone = sorted(path for path in was if was[path] not in now.values())
    new = sorted(path for path in now if now[path] not in was.values())
    changes = [f"{path} ({was[path][:_SHOWN]}) is missing" for path in gone[:1]]
    return (
        ", ".join([*changes, *(f"{path} ({now[path][:_SHOWN]}) is new" for path in new[:1])]) or "files were left out"
    )


async def _do_nothing() -> None:
    """Do nothing: a supervised run has no queue."""
