"""Options of a trainer of several processes, read once from the run's configuration."""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import orjson

from shared.errors import ConfigError
from shared.run import pinned
from shared.schema import RunConfig
from shared.web.access import Role, token_for

_OWN = ("model.path", "model.content")
"""Settings that may differ between processes; each checks the content of its own model folder."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of process `process_id` of `n`.

    Process 0 listens at `address` (host, port); `key` authenticates the processes. `settings` is a digest of the
    settings that all must share; model.path may differ on each host.
    """

    n: int
    process_id: int
    address: tuple[str, int]
    key: bytes
    settings: str


def group_options(config: RunConfig) -> GroupOptions:
    """Read the options of a run whose trainer has several processes. Raises ConfigError."""
    endpoint, mesh = config.services.trainer, config.trainer.mesh
    n = endpoint.num_processes
    if config.is_supervised:
        raise ConfigError(
            f"services.trainer.num_processes={n}: a run of mode={config.mode} is trained by one process",
            "remove services.trainer.num_processes",
        )
    if endpoint.coordinator_address is None:
        raise ConfigError(
            f"services.trainer.num_processes={n} needs services.trainer.coordinator_address",
            "set it to HOST:PORT of process 0, as the other processes reach it; `volley train` chooses it itself",
        )
    if mesh.n_devices % n:
        raise ConfigError(
            f"trainer.mesh.shape={list(mesh.shape)}: {mesh.n_devices} devices do not divide over"
            f" services.trainer.num_processes={n}",
            "choose a mesh whose number of devices is a multiple of it: every process has the same number",
        )
    host, _, port = endpoint.coordinator_address.rpartition(":")
    token = token_for(config.services.token_files, Role.SERVICE) or ""
    alike = {key: value for key, value in pinned.relevant(config).items() if not key.startswith(_OWN)}
    settings = blake3.blake3(orjson.dumps(alike, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return GroupOptions(n, endpoint.process_id, (host.strip("[]"), int(port)), token.encode(), settings)
