"""First start of a run: its identifier, its name, and settings that the configuration file may leave out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.files.reading import read_file
from shared.models import content
from shared.models.hub import model_folder
from shared.models.weight_files import KEY, check_random, weight_files
from shared.run import commits, pinned
from shared.run.folder import RunFolder
from shared.run.pinned import Flat


def is_from_random(loaded: LoadedConfig, folder: RunFolder, recorded: Flat) -> bool:
    """Tell if an older version of Volley started this run from random weights, and it has no checkpoint yet.

    Versions without the key `model.initial_weights` used random weights if the model's folder held none; later ones
    record the key.
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
    """Add the digests of the model's folder, or those of `recorded` if there is no such folder.

    Raises ConfigError.
    """
    try:
        model = model_folder(loaded.config.model.path, folder.path)
    except ConfigError:  # the services refuse it
        return config.changed(loaded, {content.KEY: content_of(recorded) or None})
    return config.changed(loaded, {content.KEY: content.digests(model)})


def with_former_defaults(loaded: LoadedConfig, in_force: Flat, say: Callable[[str], None]) -> LoadedConfig:
    """Keep the former defaults in force of keys that the configuration does not give."""
    kept = pinned.changes(pinned.as_recorded(loaded.config, in_force), pinned.relevant(loaded.config))
    for one in kept:
        say(f"{one}: this default changed after the run was started, and the run keeps the former one")
    return config.changed(loaded, {one.key: one.was for one in kept}) if kept else loaded


def content_of(recorded: Flat) -> dict[str, str]:
    """Digests among recorded settings; older runs have none."""
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
