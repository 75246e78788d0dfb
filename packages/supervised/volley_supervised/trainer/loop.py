"""Main loop of a supervised run: train, evaluate, log, save, stop in order.

Order of a checkpoint: lines written, then the checkpoint durable, which carries the lines since the last one. After a
crash between the two, the next start repairs the file from the newest checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from services.trainer.status import TrainerStatus
from services.trainer.step_log import FencedLog
from services.trainer.waiter import Waiter
from shared.process.sinks import MetricsFanout
from shared.run.pinned import Flat
from shared.run.state import TrainerState
from shared.types import WeightVersion
from volley_supervised.conversations.data import RunData
from volley_supervised.conversations.dataset import Example
from volley_supervised.metrics import SupervisedMetrics


class Backend(Protocol):
    """See volley_supervised.trainer.backend."""

    def restore(self) -> TrainerState | None: ...

    def build(self) -> None: ...

    def open(self, examples: Sequence[Example]) -> int: ...

    def step(self) -> SupervisedMetrics | None: ...

    def evaluate(self, examples: Sequence[Example]) -> Mapping[str, float]: ...

    def relabel(self, state: TrainerState) -> Path: ...

    def save(self, state: TrainerState, base: WeightVersion | None) -> Path: ...


@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    """Plain values that the loop needs; see `TrainPlan`. `keep_reference` is for DPO."""

    seed: int
    batch_size: int
    save_interval_steps: int
    eval_every_n_steps: int | None
    grace_s: float
    keep_reference: bool
    settings: Flat = field(default_factory=dict[str, Any])
    origin: Mapping[str, Any] | None = None


class SupervisedLoop:
    """Trains from the start of an epoch to the last step.

    Args:
        state: at the start of this epoch.
        last: number of the last step.
    """

    def __init__(
        self,
        plan: SupervisedPlan,
        backend: Backend,
        log: FencedLog,
        sinks: MetricsFanout,
        status: TrainerStatus,
        waiter: Waiter,
        data: RunData,
        state: TrainerState,
        last: int,
    ) -> None:
        self._plan, self._backend, self._status, self._waiter = plan, backend, status, waiter
        self._log, self._sinks = log, sinks
        self._data, self._state, self._last = data, state, last
        self._unsaved: list[Mapping[str, Any]] = []
        self._durable: WeightVersion | None = None

    async def run(self, *, resumed: bool) -> None:
        """Train until a stop; `resumed` if a checkpoint was restored. Raises Fenced, NonFinite."""
        status, state = self._status, self._state
        status.max_steps, status.step, status.epoch, status.version = (
            self._last,
            state.step,
            state.epoch,
            str(state.version),
        )
        if resumed:
            await self._waiter.retry_until_stopped(lambda: self._waiter.blocking(self._backend.relabel, state))
            self._durable = state.version
            status.durable(state.step)
        else:
            await self._log_line({"step": 0, "max_steps": self._last, **self._data.counts()})
            await self._save()
        await self._steps()
        await self._until_stop()

    async def _steps(self) -> None:
        status = self._status
        while self._state.step < self._last and not status.stopping:
            if status.paused:
                if status.checkpoint_wanted and self._unsaved:
                    await self._save()
                status.phase, status.checkpoint_wanted = "paused", False
                await self._changed()
                continue
            await self._step()
            if self._state.step % self._plan.save_interval_steps == 0 or status.checkpoint_wanted:
                await self._save()
        if self._unsaved:
            await self._save()

    async def _step(self) -> None:
        self._status.phase, started = "training", time.perf_counter()
        metrics = await self._waiter.blocking(self._backend.step)
        assert metrics is not None
        step_s = time.perf_counter() - started
        phase = "done" if metrics.step >= self._last else "rl"
        self._state = replace(self._state, step=metrics.step, phase=phase)
        self._status.trained(metrics.step, str(self._state.version), metrics)
        await self._log_line(metrics.to_line() | {"step_s": step_s, "tokens_per_sec": metrics.tokens / step_s})

    async def _log_line(self, measured: Mapping[str, Any]) -> None:
        """Write the line of the present step, with an evaluation if one is due, and send it to the sinks."""
        held_out = {f"eval_{name}": value for name, value in (await self._measured()).items()}
        about = {"epoch": self._passed() / self._n_examples, "version": str(self._state.version), "time": time.time()}
        line = {**measured, **held_out, **about}
        self._unsaved.append(line)
        await self._log.append(line)
        self._sinks.send("supervised", line)

    async def _measured(self) -> Mapping[str, float]:
        """Evaluate on the held-out examples if it is due; metrics by name."""
        step, every = self._state.step, self._plan.eval_every_n_steps
        if not self._data.held_out or not (step in (0, self._last) or (every and step % every == 0)):
            return {}
        return await self._waiter.blocking(self._backend.evaluate, self._data.held_out)

    async def _save(self) -> None:
        """Make a checkpoint, with the position in the data and the lines since the last one."""
        status, backend, started = self._status, self._backend, time.perf_counter()
        status.phase = "saving"
        epoch, offset = divmod(self._passed(), self._n_examples)
        position: dict[str, Any] = {
            "digest": self._data.digest,
            "examples": self._n_examples,
            "epoch": epoch,
            "offset": offset,
        }
        if self._data.files:
            position["files"] = dict(self._data.files)
        state = replace(self._state, metrics=tuple(self._unsaved), data=position)
        await self._log.flush()
        await self._waiter.retry_until_stopped(lambda: self._waiter.blocking(backend.save, state, self._durable))
        status.timed("save", time.perf_counter() - started)
        self._unsaved, self._durable, status.checkpoint_wanted = [], state.version, False
        status.durable(state.step)

    @property
    def _n_examples(self) -> int:
        return len(self._data.train.examples)

    def _passed(self) -> int:
        """Number of examples trained on, with repetitions."""
        return self._state.step * self._plan.batch_size

    async def _until_stop(self) -> None:
        status = self._status
        while not status.stopping:
            status.phase = "done"
            await self._changed()
        status.phase = "stopped"

    async def _changed(self) -> None:
        await self._status.changed.wait()
        self._status.changed.clear()
