"""First start of a run: fill in missing settings, and record digests of the files used."""

from __future__ import annotations

import itertools

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.models import content
from shared.models.hub import model_folder
from shared.run import pinned
from shared.run.folder import RunFolder
from shared.run.pinned import Flat
from shared.visible import quoted


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


def check_files(was: Flat, loaded: LoadedConfig, folder: RunFolder) -> None:
    """Raise ConfigError naming environment files that changed since the run's start."""
    env, before = loaded.config.data.env, was.get("data.env")
    source = loaded.config.data.sources.get(env)
    if source is None or str(before).rpartition("-")[0] != env.rpartition("-")[0] or before == env:
        return
    made_of = ", ".join(source.made_of) or source.path.name
    raise ConfigError(
        f"{made_of}: the run began with other files, other contents, or other options that read them",
        f"for a new run add run.name={_free_name(folder)}; `volley up {quoted(folder.path)}` continues this one",
    )


def _free_name(folder: RunFolder) -> str:
    """Return the run's name with the first number that no folder beside it has."""
    names = (f"{folder.name}-{n}" for n in itertools.count(2))
    return next(name for name in names if not (folder.path.parent / name).exists())
