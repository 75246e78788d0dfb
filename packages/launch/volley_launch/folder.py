"""The folder that `volley launch` writes: one configuration for all hosts, secrets, and a script that starts the run.

run.yaml      the run's configuration, without addresses
secrets/      password of Redis, a token for each role; mode 0700
hosts/        logs of the hosts after the first, in folders named after them
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.files import storage
from shared.run.folder import RunFolder
from shared.services import SERVICES
from shared.services_schema import TokenFiles
from volley.runs.record import dated
from volley.runs.run_file import read_record
from volley.session_files import write_private
from volley_launch.hosts import SECRETS

_ADDRESSES: Mapping[str, Any] = {
    "services.redis_url": None,
    "services.redis_password_file": None,
    **{f"services.token_files.{role}": None for role in TokenFiles.model_fields},
    **{f"services.{name}.host": "127.0.0.1" for name in SERVICES},
    **{f"services.{name}.url": None for name in SERVICES},
    "services.rollout_urls": (),
    "services.trainer.coordinator_address": None,
}
"""Keys that the hosts set when they start, with their defaults."""


@dataclass(frozen=True, slots=True)
class LaunchFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "run.yaml"

    @property
    def secrets(self) -> Path:
        return self.path / "secrets"

    def host(self, i: int, address: str) -> RunFolder:
        """Return the folder of the host's logs and of the files that its services read."""
        return RunFolder(self.path / "hosts" / f"{i}-{address.replace(':', '_')}")

    def write(self, loaded: LoadedConfig, scripts: Mapping[str, str]) -> None:
        """Write configuration, missing secrets and scripts. Raises ConfigError if the folder is another run's."""
        if self.config.exists() and (name := config.load([self.config]).config.run.name) != loaded.config.run.name:
            raise ConfigError(f"{self.path} belongs to the run {name}", "choose another folder with --out")
        with storage.storage(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)  # the configuration may have secrets from the environment
            self.secrets.mkdir(mode=0o700, exist_ok=True)
            (self.path / "hosts").mkdir(exist_ok=True)
            for name in SECRETS:
                if not (self.secrets / name).exists():
                    write_private(self.secrets / name, secrets.token_hex(32).encode())
        storage.replace(self.config, loaded.to_yaml().encode())
        for name, text in scripts.items():
            storage.replace(self.path / name, text.encode())
            (self.path / name).chmod(0o755 if text.startswith("#!") else 0o644)


def without_addresses(loaded: LoadedConfig) -> LoadedConfig:
    """Return the configuration without addresses and secrets; the notes name those that were set."""
    given: dict[str, Any] = {}
    for key, default in _ADDRESSES.items():
        value: Any = loaded.config
        for part in key.split("."):
            value = getattr(value, part)
        if value != default:
            given[key] = list(default) if isinstance(default, tuple) else default
    if not given:
        return loaded
    note = f"{', '.join(given)}: left out, since the script chooses addresses and secrets"
    return replace(config.changed(loaded, given), notes=(*loaded.notes, note))


def with_date(loaded: LoadedConfig, launch: LaunchFolder) -> LoadedConfig:
    """Set run.date as an earlier launch or the run itself has it, else to today's date."""
    if loaded.config.run.date is None and launch.config.exists():
        date = config.load([launch.config]).config.run.date
        loaded = replace(config.changed(loaded, {"run.date": date and date.isoformat()}), notes=loaded.notes)
    return replace(dated(loaded, read_record(RunFolder(loaded.config.run.folder))), notes=loaded.notes)
