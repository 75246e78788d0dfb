"""The trainer with Tunix behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace

from services.trainer import options as from_run
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.learner.backend import TunixBackend, check_vocabulary
from services.trainer.loop.ledger import StepLog
from services.trainer.loop.warm_start import WarmStart
from services.trainer.settings import TokenLimits
from services.trainer.status import TrainerStatus
from services.trainer.wiring import Given, Learns, open_trainer
from shared.clients.env import EnvClient
from shared.models.config import ModelConfig
from shared.process.boot import RunningService
from shared.schema import RunConfig


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    """Raises ConfigError."""
    async with open_trainer(config, _tunix) as service:
        yield service


def _tunix(given: Given) -> Learns:
    """Raises ConfigError."""
    config, settings = given.config, given.settings
    model = replace(from_run.model_options(config, given.folder), origin=given.origin)
    described = ModelConfig.read(model.folder)
    check_vocabulary(given.tokenizer, described)
    tokens = TokenLimits(described.vocab_size, given.tokenizer.pad_id)
    checkpoints = CheckpointFolders(
        settings.run_folder / "checkpoints", settings.run, settings.max_to_keep, OrbaxArrays()
    )
    backend = TunixBackend(model, described, from_run.policy_options(config, tokens), checkpoints)
    sft = from_run.sft_options(config, tokens)

    async def warm_start(environments: EnvClient, board: TrainerStatus, executor: Executor) -> None:
        log = StepLog(settings.run_folder / "sft.jsonl")
        await WarmStart(settings.env, settings.n_demonstrations, sft, environments, given.tokenizer, log)(
            backend, board, executor
        )

    return Learns(backend, checkpoints, tokens, warm_start)
