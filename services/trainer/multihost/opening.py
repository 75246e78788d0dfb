"""Construction of the backend and its warm start from the run's configuration."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from services.trainer import options as from_run
from services.trainer.backend.assembly import ModelCheckpoints, check_vocabulary, note_positions, note_tokenizer
from services.trainer.backend.inputs import BackendInputs, OpenedBackend
from services.trainer.backend.memory import TrainingMemory
from services.trainer.backend.policy import PolicyBackend
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.conversations.data import data_settings
from services.trainer.learner.supervised import SupervisedOptions
from services.trainer.multihost.backend import FollowingCalls, LeadingBackend
from services.trainer.multihost.checkpoints import FollowingCheckpoints, LeadingCheckpoints
from services.trainer.multihost.options import group_options
from services.trainer.multihost.processes import Follower, Leader
from services.trainer.multihost.publications import FollowingPublications, LeadingPublications
from services.trainer.publishing.publications import ModelPublications
from services.trainer.settings import TokenLimits
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from services.trainer.supervised.warm_start import WarmStart
from shared.clients.env import EnvClient
from shared.config import apply_settings
from shared.errors import ConfigError
from shared.models import origin
from shared.models.chat import ChatTokenizer, tokenizer_of_run
from shared.models.config import ModelConfig
from shared.models.content import with_content
from shared.models.hub import kept_in, model_folder
from shared.models.origin import Origin
from shared.run.folder import RunFolder
from shared.schema import RunConfig


def open_backend(given: BackendInputs) -> OpenedBackend:
    """Raises ConfigError."""
    config, settings = given.config, given.settings
    folder, processes = RunFolder(settings.run_folder), group_options(config)
    kept = folder.checkpoints, settings.run, settings.max_to_keep
    leader = None if processes is None else Leader(processes)
    checkpoints = CheckpointFolders(*kept, OrbaxArrays()) if leader is None else LeadingCheckpoints(*kept, leader)
    publications = given.publications if leader is None else LeadingPublications(given.publications, leader)
    own, tokens, options = _backend(config, given.folder, given.tokenizer, given.origin, checkpoints, publications)
    leading = None if leader is None else LeadingBackend(own, leader)
    backend = leading or own

    async def warm_start(environments: EnvClient, status: TrainerStatus, executor: Executor) -> None:
        data, log = data_settings(config), StepLog(folder.sft)
        start = WarmStart(data, options, environments, given.tokenizer, log, given.sinks)
        await start(backend, status, executor)

    return OpenedBackend(backend, checkpoints, tokens, warm_start, close=leading.close if leading else lambda: None)


def open_following(config: RunConfig, follower: Follower) -> FollowingCalls:
    """Open the backend of a follower. Raises ConfigError."""
    run = RunFolder(config.run.folder.absolute())
    found = origin.find(config.model.path, kept_in(run.path))
    if found is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": found.path})})
    folder = model_folder(config.model.path, run.path, weights=True)
    config = with_content(config, folder)
    checkpoints = FollowingCheckpoints(run.checkpoints, follower)
    publications = FollowingPublications(follower)
    own, _, options = _backend(
        config, folder, tokenizer_of_run(folder, config.run.date), found, checkpoints, publications
    )
    return FollowingCalls(own, options)


def _backend(
    config: RunConfig,
    folder: Path,
    tokenizer: ChatTokenizer,
    origin: Origin | None,
    checkpoints: ModelCheckpoints,
    publications: ModelPublications,
) -> tuple[PolicyBackend, TokenLimits, SupervisedOptions | None]:
    """Make the backend, its token limits, and the options of the warm start, if the run has one."""
    model = replace(from_run.model_options(config, folder), origin=origin)
    described = ModelConfig.read(model.folder)
    check_vocabulary(tokenizer, described)
    note_positions(config, described)
    note_tokenizer(tokenizer)
    check_turns(config, tokenizer)
    tokens = TokenLimits(described.vocab_size, tokenizer.pad_id, described.routing)
    options = from_run.supervised_options(config, tokens) if config.sft.trains else None
    policy, warm_start = from_run.policy_options(config, tokens), options.layout if options else None
    backend = PolicyBackend(
        model,
        described,
        policy,
        checkpoints,
        warm_start=warm_start,
        publications=publications,
        options_under=lambda settings: from_run.policy_options(apply_settings(config, settings), tokens),
        planned=TrainingMemory(config, described),
    )
    return backend, tokens, options


def check_turns(config: RunConfig, tokenizer: ChatTokenizer) -> None:
    """Raise ConfigError if rewards are credited by turn, and episodes have a sequence for each turn."""
    if config.algorithm.credit == "turn" and (how := tokenizer.looks_back(calls=False)) is not None:
        raise ConfigError(
            f"algorithm.credit=turn counts rewards within one sequence, but {how}",
            "choose algorithm.credit=episode, or a chat template that only appends",
        )
