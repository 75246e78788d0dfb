"""The one table of the services: what the supervisor, the commands and the deployment files know of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """One kind of service.

    `port` is where it listens by default, `environment` the virtual environment it runs in, `start_s` how long it may
    take to answer for the first time, in seconds (model loading and compiling included). `needs` are the services that
    have to answer before it is started, `describes` the paths at which it tells a viewer of itself. Of a `replicated`
    one there may be several, known to the orchestrator.
    """

    name: str
    port: int
    environment: str
    start_s: float
    needs: tuple[str, ...] = ()
    describes: tuple[str, ...] = ()
    replicated: bool = False

    @property
    def module(self) -> str:
        return f"services.{self.name}"


_TABLE = (
    ServiceInfo("env", 8101, "base", 120.0),
    ServiceInfo("trainer", 8104, "trainer", 900.0, ("env",), ("/status",)),
    ServiceInfo("rollout", 8102, "rollout", 900.0, ("env",), ("/weights", "/get_server_info"), replicated=True),
    ServiceInfo("orchestrator", 8103, "base", 120.0, ("env",), ("/runs",)),
)
SERVICES: Mapping[str, ServiceInfo] = {service.name: service for service in _TABLE}
"""By name, in the order in which a supervisor starts them."""
