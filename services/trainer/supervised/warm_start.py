"""Warm start: load conversations, then train step by step until the end or a stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from services.trainer.conversations.data import DataSettings, load
from services.trainer.conversations.dataset import Example
from services.trainer.conversations.demonstrations import Demonstrator
from services.trainer.learner.supervised import SupervisedOptions
from services.trainer.metrics.lines import warm_start_line
from services.trainer.metrics.supervised import SupervisedMetrics
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from services.trainer.waiter import Waiter
from shared.models.chat import ChatTokenizer
from shared.process import telemetry
from shared.process.sinks import MetricsFanout

_LOGGED_EVERY_S = 0.2
_log = telemetry.Log("warm_start")


class WarmStarting(Protocol):
    """Method of a backend that the warm start calls."""

    def warm_start(self, examples: Sequence[Example], options: SupervisedOptions) -> Iterator[SupervisedMetrics]: ...


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Supervised steps on the configured data; none if `options` is None."""

    data: DataSettings
    options: SupervisedOptions | None
    client: Demonstrator
    tokenizer: ChatTokenizer
    log: StepLog
    sinks: MetricsFanout

    async def __call__(self, backend: WarmStarting, status: TrainerStatus, executor: Executor) -> None:
        """Train; return early if a stop is asked for. Raises ConfigError, NotFound."""
        if self.options is None:
            return
        waiter = Waiter(executor, status)
        await waiter.retry_until_stopped(lambda: asyncio.to_thread(self.log.clear))
        data = (await load(self.data, self.tokenizer, self.client, waiter)).train
        _log.info("data", **data.counts())
        steps = backend.warm_start(data.examples, self.options)
        while not status.stopping:
            trained: list[dict[str, Any]] = []
            try:
                await waiter.blocking(_train, steps, status, trained)
            finally:
                self._record(trained)
            if not trained:
                return

    def _record(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write the lines of the steps."""
        self.log.append(*lines)
        for line in lines:
            self.sinks.send("warm_start", line)
            if line["step"] % 20 == 0 or line["step"] == line["max_steps"]:
                _log.info("supervised step", step=line["step"], loss=round(line["loss"], 4))


def _train(steps: Iterator[SupervisedMetrics], status: TrainerStatus, lines: list[dict[str, Any]]) -> None:
    """Train steps for a moment, or until the end or a stop, and append their lines to `lines`.

    A step may take a few milliseconds: waking the event loop and opening the file after each would cost as much.
    """
    until = time.monotonic() + _LOGGED_EVERY_S
    for metrics in steps:
        lines.append(warm_start_line(metrics))
        if status.stopping or time.monotonic() > until:
            return
