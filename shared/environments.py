"""Built-in environments: their names, and which of them read data files.

A run that plays another name is refused before anything starts, unless environments were submitted to it.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from shared import packages
from shared.errors import ConfigError
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from shared.visible import shortened

_OF_CORE = ("frozen_lake",)
_FILES = ("train", "eval")


def datasets() -> frozenset[str]:
    """Return the built-in environments that read data.train and data.eval. Raises ConfigError."""
    return frozenset(packages.found(packages.DATASETS))


def built_in() -> frozenset[str]:
    """Return the environments of the core and of installed packages. Raises ConfigError."""
    return frozenset({*_OF_CORE, *packages.found(packages.ENVIRONMENTS), *datasets()})


def check_environments(config: RunConfig) -> None:
    """Raise ConfigError for an environment of a new run that does not exist, or that needs data files and has none."""
    data, service, run = config.data, config.services.env, RunFolder(config.run.folder)
    if service.url is not None or run.record.exists():
        return  # the service is another host's, and so are its environments and files; or it has seen them before
    folder = service.folder or run.environments
    for name, entry in data.environments.items() if data.env else ():
        key, kind = "data.env" if name == data.env else "data.mixture", entry.base or name
        if name in data.sources:
            continue
        if kind not in built_in():
            if (folder / "submitted").exists():
                continue
            if owner := packages.missing(kind):
                raise ConfigError(f"{key}={kind}: {owner}", "install it, or name another environment")
            near = get_close_matches(kind, built_in(), n=1)
            raise ConfigError(
                f"{key}={kind}: there is no such environment",
                f"name the folder as ./{kind}"
                if Path(kind).is_dir()
                else f"did you mean {near[0]}? Built in are {shortened(sorted(built_in()))}"
                if near
                else f"built in are {', '.join(sorted(built_in()))}; else name a file",
            )
        given = {file for file in _FILES if entry.env_config.get(file) or _file(config, file) is not None}
        if kind in datasets() and not given:
            raise ConfigError(
                f"{key}={kind} reads its tasks from files, and none is named",
                "set data.train and data.eval, see docs/builtin-environments.md",
            )


def _file(config: RunConfig, name: str) -> Path | None:
    return config.data.train if name == "train" else config.data.eval
