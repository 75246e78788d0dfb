"""Hosts of a run that takes several: the services, addresses and ports of each.

The first `services.trainer.num_processes` hosts run the trainer, each of the others `services.rollout_replicas` rollout
servers. The first host also runs Redis, environments and orchestrator, and shows the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.schema import RunConfig
from shared.services_schema import TokenFiles
from volley.local.hosts import RunHost, in_url

FIRST_PORT = 8100
"""First port by default: environments are then at 8101, the orchestrator at 8103, the trainer at 8104."""
SECRETS = ("redis_password", *(f"token_{role}" for role in TokenFiles.model_fields))
_ENV, _ORCHESTRATOR, _TRAINER, _COORDINATOR, _REDIS, _ROLLOUT = 1, 3, 4, 5, 6, 10


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a run, in order. `secrets` is the folder with the files `SECRETS`, at the same path on each."""

    addresses: tuple[str, ...]
    n_trainers: int
    n_rollout: int
    first_port: int
    secrets: Path
    scheme: str = "http"

    @classmethod
    def of(cls, config: RunConfig, addresses: tuple[str, ...], first_port: int, secrets: Path) -> Hosts:
        """Raises ConfigError if there are fewer hosts than the run needs, or it cannot use several."""
        check(config)
        services = config.services
        n_trainers = services.trainer.num_processes
        if len(set(addresses)) != len(addresses):
            raise ConfigError(f"--hosts names a host twice: {','.join(addresses)}", "name each host once")
        if len(addresses) <= n_trainers:
            raise ConfigError(
                f"{len(addresses)} hosts ({','.join(addresses)}), but the run needs at least {n_trainers + 1}: "
                f"{n_trainers} for services.trainer.num_processes and one for rollout servers",
                "name more hosts; on a single one use `volley train`",
            )
        last = first_port + _ROLLOUT + services.rollout_replicas
        if not 0 < first_port <= last < 2**16:
            raise ConfigError(f"--first-port {first_port}: the run would need ports up to {last}", "choose a lower one")
        scheme = "https" if services.tls.cert_file else "http"
        return cls(addresses, n_trainers, services.rollout_replicas, first_port, secrets, scheme)

    def place(self, i: int) -> RunHost:
        """Return the place of host `i`. Raises ConfigError if there is no such host."""
        if not 0 <= i < len(self.addresses):
            raise ConfigError(f"--index {i}: there are {len(self.addresses)} hosts", "the first host has the index 0")
        if i == 0:
            counts = {"env": 1, "orchestrator": 1, "trainer": 1}
            return RunHost(self.addresses[0], counts, self.first_port + _REDIS, self.secrets / "redis_password")
        counts = {"trainer": 1} if i < self.n_trainers else {"rollout": self.n_rollout}
        return RunHost(self.addresses[i], counts)

    def layer(self, i: int) -> dict[str, Any]:
        """Return the layer of host `i` over the run's configuration: addresses, ports, secrets, the trainer's process.

        The first host finds its own services by their ports; the others find those of the first by `url`.
        """
        is_head, place, head = i == 0, self.place(i), in_url(self.addresses[0])
        offsets = {"env": _ENV, "orchestrator": _ORCHESTRATOR, "trainer": _TRAINER}
        services: dict[str, Any] = {
            name: {
                "host": place.listen,
                "port": self.first_port + offset,
                "url": None if is_head else f"{self.scheme}://{head}:{self.first_port + offset}",
            }
            for name, offset in offsets.items()
        }
        services["trainer"] |= {"process_id": i if i < self.n_trainers else 0, "coordinator_address": None}
        if self.n_trainers > 1:
            services["trainer"]["coordinator_address"] = f"{head}:{self.first_port + _COORDINATOR}"
        services["rollout"] = {"host": place.listen, "port": self.first_port + _ROLLOUT, "url": None}
        return {
            "services": services
            | {
                "redis_url": None if is_head else f"redis://{head}:{self.first_port + _REDIS}/0",
                "redis_password_file": str(self.secrets / "redis_password"),
                "token_files": {role: str(self.secrets / f"token_{role}") for role in TokenFiles.model_fields},
                "rollout_urls": [],
            }
        }


def check(config: RunConfig) -> None:
    """Raises ConfigError for a run that several hosts cannot share."""
    if config.is_supervised:
        raise ConfigError(f"mode={config.mode}: a supervised run uses a single host", "use `volley train` on it")
    if config.rollout.engine.is_external:
        raise ConfigError(
            "rollout.engine.url: `volley node` starts the engines itself",
            "remove it, or start the rollout servers by hand as docs/hosts.md describes",
        )
