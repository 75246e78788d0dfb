"""The table of the services: the supervisor, the commands, the errors and the proofs know them from here.

A new service is a row here, an `Endpoint` in `services_schema.py` and a folder `services/NAME/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

type ServiceName = Literal["env", "rollout", "orchestrator", "trainer"]


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """One kind of service.

    `port` is where it listens by default, `environment` the virtual environment it runs in, `start_s` how long it may
    take to answer for the first time, in seconds (model loading and compiling included). `needs` are the services that
    have to answer before it is started, `describes` the paths at which it tells a viewer of itself. A service of one
    run alone has a `run_key`: the key of the run's name in the answer of the first of these paths.

    Of a `replicated` one there may be several: `services.NAME_replicas` are started here, `services.NAME_urls` are
    those that others started. A `shared` one may serve several runs: `services.NAME.url` names one that others started.
    `supervised`: supervised runs have it, too.
    """

    name: str
    port: int
    environment: str
    start_s: float
    needs: tuple[str, ...] = ()
    describes: tuple[str, ...] = ()
    run_key: str | None = None
    replicated: bool = False
    shared: bool = False
    supervised: bool = False

    @property
    def module(self) -> str:
        return f"services.{self.name}"

    @property
    def guarded(self) -> str:
        """A path that only callers with a viewer's token may read."""
        return (*self.describes, "/metrics")[0]

    def process(self, i: int) -> str:
        """Name of process number `i`: env, rollout-0, …, orchestrator, trainer, trainer-1, …"""
        return f"{self.name}-{i}" if i or self.replicated else self.name


_TABLE = (
    ServiceInfo("env", 8101, "base", 120.0, shared=True, supervised=True),
    ServiceInfo("rollout", 8102, "rollout", 900.0, ("env",), ("/weights", "/get_server_info"), replicated=True),
    ServiceInfo("orchestrator", 8103, "base", 120.0, ("env",), ("/runs",), "name"),
    ServiceInfo("trainer", 8104, "trainer", 900.0, ("env",), ("/status",), "run", supervised=True),
)
SERVICES: Mapping[str, ServiceInfo] = {service.name: service for service in _TABLE}
"""By name, in the order of the flow: a service waits for those after it more often than for those before it."""


def kind_of(process: str) -> str:
    """Name of the service that a process belongs to."""
    return process.partition("-")[0]
