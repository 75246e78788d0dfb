"""A run's configuration as its hosts get it, and what each host would run."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.findings import findings
from shared.run_config import paths_of
from shared.schema import RunConfig
from volley.layout import PROJECT
from volley_launch.folder import LaunchFolder, with_date, without_addresses
from volley_launch.hosts import FIRST_PORT, Hosts
from volley_launch.scripts import REMOTE

_FILES = ("model.path", "data.train", "data.eval")
_PRIVATE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - compared, not used


def prepared(loaded: LoadedConfig, launch: LaunchFolder, n_hosts: int) -> LoadedConfig:
    """Return the configuration without addresses and with a date, and check it. Its notes are for the user.

    Raises ConfigError, also if `n_hosts` are too few.
    """
    made = with_date(without_addresses(loaded), launch)
    names = tuple(f"host{i}" for i in range(n_hosts))
    if n_hosts > 1 or made.config.services.trainer.num_processes > 1:
        Hosts.of(made.config, names, FIRST_PORT, launch.secrets)
    return replace(made, notes=(*made.notes, *findings(made.config)))


def on_shared_disk(loaded: LoadedConfig, launch: LaunchFolder) -> LoadedConfig:
    """Make paths absolute for hosts that share this one's file system. A note names folders that are hardly shared."""
    made = config.rooted(loaded, Path.cwd())
    private = (*_PRIVATE, tempfile.gettempdir())
    notes = [f"{key}={path}: no such file here; the nodes must have it" for key, path in _missing(made.config)]
    notes += [
        f"{key} {path} is in a folder that every node usually has to itself; the nodes must share it"
        for key, path in (("run.dir", made.config.run.dir), ("the launch folder", launch.path))
        if any(path.is_relative_to(folder) for folder in private)
    ]
    return replace(made, notes=(*loaded.notes, *notes))


def for_other_disks(loaded: LoadedConfig, n_hosts: int) -> tuple[LoadedConfig, dict[str, Path]]:
    """Let the configuration name copies of this machine's files. Returns them by path in a host's home folder.

    The hosts start Volley in a folder of their home folder. Raises ConfigError for what cannot be copied, and for a run
    that needs a shared disk and names none.
    """
    _check_durable(loaded.config)
    _check_files(loaded.config)
    files: dict[str, Path] = {}

    def copied(path: Path) -> str:
        name = f"{REMOTE}/files/{len(files)}-{re.sub(r'[^A-Za-z0-9._-]+', '_', path.name)}"  # for shells and scp
        files[name] = path.absolute()
        return f"../{name}"

    given: dict[str, Any] = {}
    for key in _FILES:
        section, _, leaf = key.partition(".")
        value = getattr(getattr(loaded.config, section), leaf)
        if value is not None and Path(value).exists():
            given[key] = copied(Path(value))
    given |= {key: [*map(copied, paths)] for key, paths in paths_of(loaded.config).items() if paths}
    made = config.changed(loaded, given) if given else loaded
    notes = [*loaded.notes, *(f"{key}={path}: the hosts must have it" for key, path in _missing(loaded.config))]
    if n_hosts and loaded.config.run.bucket is None and not loaded.config.run.dir.is_absolute():
        notes.append(
            "the run is kept on the first host's disk alone, and lost with it: set run.bucket, or run.dir to a file"
            " system that is mounted there"
        )
    return replace(made, notes=tuple(notes)), files


def _check_durable(config: RunConfig) -> None:
    """Raises ConfigError."""
    n_trainers = config.services.trainer.num_processes
    if n_trainers > 1 and not config.run.dir.is_absolute():
        raise ConfigError(
            f"run.dir={config.run.dir}: the trainer's {n_trainers} hosts write one checkpoint into it together",
            "mount a file system on them (Filestore, NFS), and set run.dir to an absolute path on it",
        )
    model = config.model.path
    if "@" in model and not Path(model).is_dir():
        raise ConfigError(f"model.path={model}: the hosts do not have this run", "export it: volley export RUN FOLDER")
    if config.data.sources:
        raise ConfigError(
            f"data.sources: the hosts do not have the files of {', '.join(config.data.sources)}",
            "start the run without them, and submit them into it with `volley env submit`",
        )


def _check_files(config: RunConfig) -> None:
    """Raises ConfigError for files that the hosts would not find in their copy of the code either."""
    for key, path in _missing(config):
        if not path.is_absolute() and not (PROJECT / path).exists():
            raise ConfigError(
                f"{key}={path}: no such file", "give a file of this machine, or an absolute path of the hosts"
            )
    tls, env = config.services.tls, config.services.env
    given = {f"services.tls.{name}": value for name, value in tls.model_dump().items()}
    given["services.env.remote_tokens_file"] = env.remote_tokens_file
    for key, path in given.items():
        if path is not None and not path.is_absolute():
            raise ConfigError(f"{key}={path} is not copied to the hosts", "put it there, and give its absolute path")


def _missing(config: RunConfig) -> list[tuple[str, Path]]:
    """Data files of the configuration that this machine does not have, with their keys."""
    named = [("data.train", config.data.train), ("data.eval", config.data.eval)]
    named += [(key, path) for key, paths in paths_of(config).items() for path in paths]
    return [(key, path) for key, path in named if path is not None and not path.exists()]


def described(config: RunConfig, n_hosts: int) -> list[dict[str, Any]]:
    """Return the services of each host, by number of processes."""
    n_trainers, n_rollout = config.services.trainer.num_processes, config.services.rollout_replicas
    if n_hosts == 1:
        counts = {"redis": 0 if config.is_supervised else 1} | config.local_processes()
        return [{name: n for name, n in counts.items() if n}]
    first = {"redis": 1, "env": 1, "orchestrator": 1, "trainer": 1}
    others: Sequence[dict[str, Any]] = [{"trainer": 1}] * (n_trainers - 1)
    return [first, *others, *[{"rollout": n_rollout}] * (n_hosts - n_trainers)]
