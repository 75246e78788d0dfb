"""The backend with Tunix in it, and its warm start, from the run's configuration."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

from services.trainer import options as from_run
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.conversations.data import data_settings
from services.trainer.learner.backend import TunixBackend, check_vocabulary
from services.trainer.learner.opening import BackendInputs, OpenedBackend
from services.trainer.loop.warm_start import WarmStart
from services.trainer.settings import TokenLimits
from services.trainer.settlement.ledger import StepLog
from services.trainer.status import TrainerStatus
from shared.clients.env import EnvClient
from shared.models.config import ModelConfig
from shared.run.folder import RunFolder


def open_backend(given: BackendInputs) -> OpenedBackend:
    """Raises ConfigError."""
    config, settings = given.config, given.settings
    folder = RunFolder(settings.run_folder)
    model = replace(from_run.model_options(config, given.folder), origin=given.origin)
    described = ModelConfig.read(model.folder)
    check_vocabulary(given.tokenizer, described)
    tokens = TokenLimits(described.vocab_size, given.tokenizer.pad_id)
    checkpoints = CheckpointFolders(folder.checkpoints, settings.run, settings.max_to_keep, OrbaxArrays())
    options = from_run.supervised_options(config, tokens) if config.sft.trains else None
    backend = TunixBackend(
        model,
        described,
        from_run.policy_options(config, tokens),
        checkpoints,
        warm_start=options.layout if options else None,
        publications=given.publications,
    )

    async def warm_start(environments: EnvClient, status: TrainerStatus, executor: Executor) -> None:
        start = WarmStart(data_settings(config), options, environments, given.tokenizer, StepLog(folder.sft))
        await start(backend, status, executor)

    return OpenedBackend(backend, checkpoints, tokens, warm_start)
