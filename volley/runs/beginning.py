"""Settings that the first start of a run decides, and that its configuration file need not name."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.models import content
from shared.models.hub import model_folder
from shared.models.weight_files import KEY, check_random, weight_files
from shared.run import commits, pinned
from shared.run.folder import RunFolder
from shared.run.pinned import Flat


def is_from_random(loaded: LoadedConfig, folder: RunFolder, recorded: Flat) -> bool:
    """Tell if a version without `model.initial_weights` began a run, without a checkpoint yet, from random weights.

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


def with_content(loaded: LoadedConfig, folder: RunFolder, recorded: Flat) -> LoadedConfig:
    """The configuration with the digests of its model's folder; those of `recorded` if there is no such folder.

    Raises ConfigError.
    """
    try:
        model = model_folder(loaded.config.model.path, folder.path)
    except ConfigError:  # the services refuse it
        return config.changed(loaded, {content.KEY: content_of(recorded) or None})
    return config.changed(loaded, {content.KEY: content.digests(model)})


def content_of(recorded: Flat) -> dict[str, str]:
    """Digests among recorded settings; none in those of an older run."""
    n = len(pinned.CONTENT)
    return {key[n:]: str(value) for key, value in recorded.items() if key.startswith(pinned.CONTENT)}
