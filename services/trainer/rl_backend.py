"""Construction of the backend of RL and its warm start from the run's configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from services.trainer import options as from_run
from services.trainer.algorithms.terms.added import AddedTerms
from services.trainer.backend.assembly import ModelCheckpoints, check_vocabulary, note_positions, note_tokenizer
from services.trainer.backend.inputs import BackendInputs, OpenedBackend, no_warm_start
from services.trainer.backend.memory import training_memory
from services.trainer.backend.policy import PolicyBackend
from services.trainer.backend.warm_start import WarmStartedBackend, warm_starts
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.publishing.publications import ModelPublications
from services.trainer.settings import TokenLimits
from shared import packages
from shared.config import apply_settings
from shared.errors import ConfigError
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.origin import Origin
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from shared.supervised import supervised_steps


def open_backend(given: BackendInputs) -> OpenedBackend:
    """Open the backend of a trainer of one process. Raises ConfigError."""
    settings = given.settings
    folder = RunFolder(settings.run_folder).checkpoints
    checkpoints = CheckpointFolders(folder, settings.run, settings.max_to_keep, OrbaxArrays())
    made = make_backend(given.config, given.folder, given.tokenizer, given.origin, checkpoints, given.publications)
    return opened(given, made, made.backend, checkpoints)


@dataclass(frozen=True, slots=True)
class MadeBackend:
    """A backend and its token limits."""

    backend: PolicyBackend
    tokens: TokenLimits


def make_backend(
    config: RunConfig,
    folder: Path,
    tokenizer: ChatTokenizer,
    origin: Origin | None,
    checkpoints: ModelCheckpoints,
    publications: ModelPublications,
) -> MadeBackend:
    """Make the backend of a process; `folder` holds the model. Raises ConfigError."""
    model = replace(from_run.model_options(config, folder), origin=origin)
    described = ModelConfig.read(model.folder)
    check_vocabulary(tokenizer, described)
    note_positions(config, described)
    note_tokenizer(tokenizer)
    check_turns(config, tokenizer)
    tokens = TokenLimits(described.vocab_size, tokenizer.pad_id, described.routing)
    backend = PolicyBackend(
        model,
        described,
        from_run.policy_options(config, tokens),
        checkpoints,
        publications=publications,
        options_under=lambda settings: from_run.policy_options(apply_settings(config, settings), tokens),
        planned=training_memory(config, described),
        check=partial(check_rules, config),
        warms=supervised_steps(config) is not None,
    )
    return MadeBackend(backend, tokens)


def opened(
    given: BackendInputs, made: MadeBackend, backend: WarmStartedBackend, checkpoints: CheckpointFolders
) -> OpenedBackend:
    """Return `backend`, which computes with `made`, and its warm start. Raises ConfigError."""
    first = no_warm_start
    if supervised_steps(given.config) is not None:
        first = warm_starts().opened(given, made.tokens, backend)
    return OpenedBackend(backend, checkpoints, made.tokens, first)


def check_rules(config: RunConfig) -> None:
    """Try the user's own rules. Raises ConfigError, also if the package of such rules is not installed."""
    custom = config.trainer.filters.custom
    added: AddedTerms | None = packages.part("trainer.algorithms", required=custom is not None)
    if added is not None:
        added.check_rules(config.algorithm, custom)


def check_turns(config: RunConfig, tokenizer: ChatTokenizer) -> None:
    """Raise ConfigError if rewards are credited by turn, and episodes have a sequence for each turn."""
    if config.algorithm.credits_turns and (how := tokenizer.looks_back(calls=False)) is not None:
        raise ConfigError(
            f"algorithm.{config.algorithm.shown_credit} counts rewards within one sequence, but {how}",
            "choose algorithm.credit=episode, or a chat template that only appends",
        )
