"""Table of the services, used by the supervisor, the commands, the errors and the proofs.

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

    `port` is its default port, `environment` its virtual environment, `start_s` the longest time until its first
    answer, in seconds (model loading and compiling included). `needs` are the services that it calls, and that are
    stopped after it. `describes` are the paths at which a viewer reads its state. `run_key` is set for a service of a
    single run: the key of the run's name in the answer of the first of these paths.

    A `replicated` service may have several processes: `services.NAME_replicas` are started here, `services.NAME_urls`
    were started elsewhere. A `shared` service may serve several runs: `services.NAME.url` names one that was started
    elsewhere. `supervised` services also take part in supervised runs.
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
        """Return a path that requires a viewer's token."""
        return (*self.describes, "/metrics")[0]

    def process(self, i: int) -> str:
        """Return the name of process number `i`: env, rollout-0, …, orchestrator, trainer, trainer-1, …"""
        return f"{self.name}-{i}" if i or self.replicated else self.name


_TABLE = (
    ServiceInfo("env", 8101, "base", 600.0, shared=True, supervised=True),
    ServiceInfo("rollout", 8102, "rollout", 900.0, ("env",), ("/weights", "/get_server_info"), replicated=True),
    ServiceInfo("orchestrator", 8103, "base", 120.0, ("env",), ("/runs",), "name"),
    ServiceInfo("trainer", 8104, "trainer", 900.0, ("env",), ("/status",), "run", supervised=True),
)
SERVICES: Mapping[str, ServiceInfo] = {service.name: service for service in _TABLE}
"""Services by name, in the order of the data flow: a service mostly waits for those after it."""


def kind_of(process: str) -> str:
    """Return the name of the service that a process belongs to."""
    return process.partition("-")[0]
