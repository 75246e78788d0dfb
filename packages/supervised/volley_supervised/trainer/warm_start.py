"""Warm start: load conversations, then train step by step until the end or a stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from services.trainer.backend.inputs import BackendInputs, TrainFirst
from services.trainer.backend.warm_start import WarmStartedBackend
from services.trainer.models.family import Model
from services.trainer.settings import TokenLimits
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from services.trainer.waiter import Waiter
from shared.clients.env import EnvClient
from shared.models.chat import ChatTokenizer
from shared.process import telemetry
from shared.process.sinks import MetricsFanout
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from volley_supervised.conversations.data import DataSettings, data_settings, load
from volley_supervised.conversations.dataset import Example, TokenSequence
from volley_supervised.conversations.demonstrations import Demonstrator
from volley_supervised.learner import steps
from volley_supervised.learner.steps import SupervisedOptions
from volley_supervised.metrics import SupervisedMetrics
from volley_supervised.options import supervised_options

_LOGGED_EVERY_S = 0.2
_log = telemetry.Log("warm_start")


@dataclass(frozen=True, slots=True)
class ExampleSteps:
    """See services.trainer.backend.warm_start.WarmSteps."""

    examples: Sequence[Example]
    options: SupervisedOptions

    def train(self, model: Model) -> Iterator[SupervisedMetrics]:
        return steps.warm_start(model, self.examples, self.options)

    def to_wire(self) -> Any:
        return [[[one.ids, one.mask] for one in example] for example in self.examples]


def received(config: RunConfig, tokens: TokenLimits, examples: Any) -> ExampleSteps:
    """Return the steps on the examples of another process. Raises ConfigError."""
    made = [tuple(TokenSequence(*one) for one in example) for example in examples]
    return ExampleSteps(made, supervised_options(config, tokens))


def opened(given: BackendInputs, tokens: TokenLimits, backend: WarmStartedBackend) -> TrainFirst:
    """Return the warm start of `backend`. Raises ConfigError."""
    options, data = supervised_options(given.config, tokens), data_settings(given.config)
    log = StepLog(RunFolder(given.settings.run_folder).sft)

    async def warm_start(environments: EnvClient, status: TrainerStatus, executor: Executor) -> None:
        start = WarmStart(data, options, environments, given.tokenizer, log, given.sinks)
        await start(backend, status, executor)

    return warm_start


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Supervised steps on the configured data."""

    data: DataSettings
    options: SupervisedOptions
    client: Demonstrator
    tokenizer: ChatTokenizer
    log: StepLog
    sinks: MetricsFanout

    async def __call__(self, backend: WarmStartedBackend, status: TrainerStatus, executor: Executor) -> None:
        """Train; return early if a stop is asked for. Raises ConfigError, NotFound."""
        waiter = Waiter(executor, status)
        await waiter.retry_until_stopped(lambda: asyncio.to_thread(self.log.clear))
        data = (await load(self.data, self.tokenizer, self.client, waiter)).train
        _log.info("data", **data.counts())
        made = backend.warm_start(ExampleSteps(data.examples, self.options))
        while not status.stopping:
            trained: list[dict[str, Any]] = []
            try:
                await waiter.blocking(_train, made, status, trained)
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


def _train(made: Iterator[SupervisedMetrics], status: TrainerStatus, lines: list[dict[str, Any]]) -> None:
    """Train steps for a moment, or until the end or a stop, and append their lines to `lines`.

    A step may take a few milliseconds: waking the event loop and opening the file after each would cost as much.
    """
    until = time.monotonic() + _LOGGED_EVERY_S
    for metrics in made:
        lines.append(metrics.to_line() | {"time": time.time()})
        if status.stopping or time.monotonic() > until:
            return
