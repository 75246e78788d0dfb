"""Checks of a run's configuration, model, files and services before anything starts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from shared import packages
from shared.config import LoadedConfig
from shared.environments import check_environments
from shared.errors import ConfigError
from shared.files.reading import open_file
from shared.findings import beyond_positions, findings
from shared.models.config import ModelConfig
from shared.models.hub import check_weights, model_folder
from shared.run.folder import RunFolder
from shared.supervised import supervised_steps
from volley import choices
from volley.local import ports
from volley.local.devices import accelerators


def notes_on_model(loaded: LoadedConfig, folder: Path) -> list[str]:
    """Return notes on the model; none for a folder that the services will refuse."""
    from shared.models.tokenizer_files import read_tokenizer

    notes: list[str | None] = []
    with suppress(ConfigError):
        model = ModelConfig.read(folder)
        notes.append(beyond_positions(loaded.config, model))
        if (lacking := choices.shortages(loaded, model).get("host")) is not None:
            notes.append(f"{lacking.detail}; change: {lacking.hint}")
    with suppress(ConfigError):
        notes.append(read_tokenizer(folder).note)
    return [note for note in notes if note is not None]


def prepared(loaded: LoadedConfig) -> tuple[LoadedConfig, Path]:
    """Check what a run needs, and choose values for missing settings. Returns the model's folder too.

    A model that cannot be read is left to the services to refuse. Raises VolleyError, also if the training or a rollout
    server does not fit into memory.
    """
    folder = check_inputs(loaded)
    try:
        model = ModelConfig.read(folder)
    except ConfigError:
        return loaded, folder
    loaded = choices.fit(loaded, model)
    lacking = choices.shortages(loaded, model)
    lacking.pop("host", None)  # whose sum has a margin: a note says so
    if lacking:
        hints = " and ".join(one.hint or "" for one in lacking.values())
        raise ConfigError("; ".join(one.detail for one in lacking.values()), hints)
    return loaded, folder


def check_ports(loaded: LoadedConfig) -> None:
    """Check that the ports that a new run names are free. Raises ConfigError.

    A run that continues may first have to wait for its earlier processes, which use them.
    """
    if not RunFolder(loaded.config.run.folder.absolute()).record.exists():
        ports.choose(loaded.config.services, loaded.tree.get("services") or {}, loaded.config.local_processes())


def check_inputs(loaded: LoadedConfig) -> Path:
    """Check configuration, devices, files and external services before anything starts. Returns the model's folder.

    Raises VolleyError.
    """
    findings(loaded.config)
    check_environments(loaded.config)
    device, counts = loaded.config.rollout.engine.device, loaded.config.local_processes()
    if device != "cpu" and (counts["trainer"] or counts["rollout"]):
        accelerators().check_device(device, ())
    for key in ("train", "eval"):
        path: Path | None = getattr(loaded.config.data, key)
        if path is not None and loaded.config.services.env.url is None:  # else the file is on that service's host
            try:
                open_file(path).close()
            except OSError as error:
                raise ConfigError(
                    f"data.{key}={path}: {error.strerror}", f"give an existing file with data.{key}=…"
                ) from error
    if supervised_steps(loaded.config) is not None:
        packages.part("supervised.runs").check_files(loaded.config)
    model = loaded.config.model.path
    if "@" in model and not Path(model).is_dir():
        packages.part("folder_survey")(RunFolder(Path(model.rpartition("@")[0]).absolute()))
    folder = model_folder(model, loaded.config.run.folder)
    check_weights(loaded.config)
    if (check := packages.part("external_checks", required=False)) is not None:
        asyncio.run(check(loaded.config))
    return folder
