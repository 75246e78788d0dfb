"""Warm start: load conversations, then train step by step until the end or a stop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

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
        while (metrics := await waiter.blocking(next, steps, None)) is not None:
            line = warm_start_line(metrics)
            self.log.append(line)
            self.sinks.send("warm_start", line)
            if metrics.step % 20 == 0 or metrics.step == metrics.max_steps:
                _log.info("supervised step", step=metrics.step, loss=round(metrics.loss, 4))
            if status.stopping:
                return
