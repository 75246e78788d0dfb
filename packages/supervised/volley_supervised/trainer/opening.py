"""Construction of the supervised backend from a run's configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from services.trainer import options as from_run
from services.trainer.backend.assembly import check_vocabulary, note_positions, note_tokenizer
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.settings import TokenLimits
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from shared.models.origin import Origin
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from volley_supervised.options import supervised_options
from volley_supervised.trainer.backend import SupervisedBackend


def open_backend(
    config: RunConfig, folder: Path, tokenizer: ChatTokenizer, origin: Origin | None
) -> tuple[SupervisedBackend, CheckpointFolders]:
    """Open the backend; `folder` holds the model's config.json and tokenizer, `origin`, if set, the first weights.

    Raises ConfigError.
    """
    model = replace(from_run.model_options(config, folder), origin=origin)
    described = ModelConfig.read(model.folder)
    check_vocabulary(tokenizer, described)
    note_positions(config, described)
    note_tokenizer(tokenizer)
    options = supervised_options(config, TokenLimits(described.vocab_size, tokenizer.pad_id))
    root, kept = RunFolder(config.run.folder.absolute()).checkpoints, config.trainer.checkpointing_options.max_to_keep
    checkpoints = CheckpointFolders(root, config.run.name, kept, OrbaxArrays())
    return SupervisedBackend(model, described, options, checkpoints), checkpoints
