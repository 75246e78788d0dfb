"""First start of a run: its identifier, its name, and settings that the configuration file may leave out."""

from __future__ import annotations

from contextlib import suppress

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.files.reading import read_file
from shared.models import content
from shared.models.hub import model_folder
from shared.run import pinned
from shared.run.folder import RunFolder
from shared.run.pinned import Flat


def with_content(loaded: LoadedConfig, folder: RunFolder, recorded: Flat) -> LoadedConfig:
    """Add the digests of the model's folder, or those of `recorded` if there is no such folder.

    Raises ConfigError.
    """
    try:
        model = model_folder(loaded.config.model.path, folder.path)
    except ConfigError:  # the services refuse it
        return config.changed(loaded, {content.KEY: content_of(recorded) or None})
    return config.changed(loaded, {content.KEY: content.digests(model)})


def content_of(recorded: Flat) -> dict[str, str]:
    """Return the digests of the model's files among recorded settings."""
    n = len(pinned.CONTENT)
    return {key[n:]: str(value) for key, value in recorded.items() if key.startswith(pinned.CONTENT)}


def began(folder: RunFolder) -> bytes:
    """Return the identifier that changes when a run begins again in the emptied folder; empty if there is none."""
    with suppress(OSError):
        return read_file(folder.beginning, 1024)
    return b""


def name_of(folder: RunFolder) -> str:
    """Return the run's name in the configuration; a folder that was renamed may have another name."""
    with suppress(ConfigError):
        return config.recorded(folder.config).config.run.name
    return folder.name
