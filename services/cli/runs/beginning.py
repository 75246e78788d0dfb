"""Settings that the first start of a run decides, and that its configuration file need not name."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.models.weight_files import KEY, check_random, weight_files
from shared.run import commits
from shared.run.folder import RunFolder
from shared.run.pinned import Flat


def is_from_random(loaded: LoadedConfig, folder: RunFolder, recorded: Flat) -> bool:
    """Whether a run without a checkpoint was begun from random weights by a version without `model.initial_weights`.

    Each later version records the key. Those before it took random weights where the model's folder held none.
    """
    section, model = loaded.tree.get("model") or {}, Path(loaded.config.model.path)
    if KEY in recorded or KEY.partition(".")[2] in section or not model.is_dir() or commits.newest(folder):
        return False
    with suppress(ConfigError):
        weight_files(model)
        return False
    with suppress(ConfigError):
        check_random(model)
        return True
    return False
