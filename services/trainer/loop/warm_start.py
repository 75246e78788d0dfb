"""The warm start as the loop sees it: fetch demonstrations, then train step by step, and stop when asked."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from time import time

from services.trainer.algorithms import sft
from services.trainer.algorithms.sft import Demonstrator, SftOptions
from services.trainer.learner.backend import TunixBackend
from services.trainer.loop.interfaces import Waiter
from services.trainer.settlement.ledger import StepLog
from services.trainer.status import TrainerStatus
from shared.clients.env import DemonstrationReply
from shared.models.chat import ChatTokenizer
from shared.process import telemetry

_log = telemetry.Log("warm start")


@dataclass(frozen=True, slots=True)
class WarmStart:
    """`n_demonstrations` of the training split of `env`, `options.max_steps` supervised steps; none if that is 0."""

    env: str
    n_demonstrations: int
    options: SftOptions
    client: Demonstrator
    tokenizer: ChatTokenizer
    log: StepLog

    async def __call__(self, backend: TunixBackend, status: TrainerStatus, executor: Executor) -> None:
        """Ends early when the status asks to stop. Raises ConfigError, NotFound."""
        if not self.options.max_steps:
            return
        waiter = Waiter(executor, status)
        await waiter.patiently(lambda: asyncio.to_thread(self.log.clear))
        patient = PatientDemonstrator(self.client, waiter)
        demonstrations = await sft.fetch(patient, self.env, self.n_demonstrations, self.options.seed)
        steps = await waiter.blocking(backend.warm_start, self.tokenizer, demonstrations, self.options)
        while (metrics := await waiter.blocking(next, steps, None)) is not None:
            self.log.append(asdict(metrics) | {"time": time()})
            if metrics.step % 20 == 0 or metrics.step == metrics.max_steps:
                _log.info("supervised step", step=metrics.step, loss=round(metrics.loss, 4))
            if status.stopping:
                return


@dataclass(frozen=True, slots=True)
class PatientDemonstrator:
    """The environment service, each call repeated while it is away, so that what has been fetched is not
    fetched again.
    """

    client: Demonstrator
    waiter: Waiter

    async def num_tasks(self, env: str, split: str) -> int:
        return await self.waiter.patiently(lambda: self.client.num_tasks(env, split))

    async def demonstration(self, env: str, split: str, index: int) -> DemonstrationReply:
        return await self.waiter.patiently(lambda: self.client.demonstration(env, split, index))
