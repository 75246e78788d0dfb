"""Which process of the trainer this is, read once from the run's configuration."""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import orjson

from shared.errors import ConfigError
from shared.run import pinned
from shared.schema import RunConfig
from shared.web.access import Role, token_for

_OWN = ("model.path", "model.content")
"""Settings that each process has for itself; it compares the content of its model's folder."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """`n` processes, of which this is number `process_id`; process 0 listens at `address` (host, port), and `key` is
    what they know each other by. `settings` is a digest of what all of them must be configured alike:
    model.path aside, which may lead elsewhere on each host.
    """

    n: int
    process_id: int
    address: tuple[str, int]
    key: bytes
    settings: str


def group_options(config: RunConfig) -> GroupOptions | None:
    """None for a trainer of one process. Raises ConfigError."""
    endpoint, mesh = config.services.trainer, config.trainer.mesh
    n = endpoint.num_processes
    if n == 1:
        return None
    if config.is_supervised:
        raise ConfigError(
            f"services.trainer.num_processes={n}: a run of mode={config.mode} is trained by one process",
            "leave it out",
        )
    if endpoint.coordinator_address is None:
        raise ConfigError(
            f"services.trainer.num_processes={n} needs services.trainer.coordinator_address",
            "HOST:PORT of process 0, as the other processes reach it; `volley train` chooses it itself",
        )
    if mesh.n_devices % n:
        raise ConfigError(
            f"trainer.mesh.shape={list(mesh.shape)}: {mesh.n_devices} devices do not divide over"
            f" services.trainer.num_processes={n}",
            "the mesh is of the devices of all processes, each of which has as many",
        )
    host, _, port = endpoint.coordinator_address.rpartition(":")
    token = token_for(config.services.token_files, Role.SERVICE) or ""
    alike = {key: value for key, value in pinned.relevant(config).items() if not key.startswith(_OWN)}
    settings = blake3.blake3(orjson.dumps(alike, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return GroupOptions(n, endpoint.process_id, (host.strip("[]"), int(port)), token.encode(), settings)
