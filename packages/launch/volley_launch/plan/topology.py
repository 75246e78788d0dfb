"""Processes of a run, and where they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from shared.schema import RunConfig
from shared.services import SERVICES
from shared.services_schema import Endpoint
from volley_launch.planning.devices import Devices

HERE = "this machine"


def processes(config: RunConfig, *, is_elsewhere: bool) -> dict[str, list[str]]:
    """Names of the run's processes by host, those that `volley train` starts on this machine first.

    Args:
        is_elsewhere: trainer and rollout servers use devices that this machine does not have.
    """
    found: dict[str, list[str]] = {HERE: []}
    for name, info in SERVICES.items():
        if not config.uses(name):
            continue
        urls = config.services.urls_of(name)
        for process, url in urls.items():
            found.setdefault(urlsplit(url).hostname or url, []).append(process)
        local = [info.process(i) for i in range(config.services.n_local(name))]
        found.setdefault(_host(config, name, is_elsewhere=is_elsewhere), []).extend(local)
    return {host: names for host, names in found.items() if names}


def _host(config: RunConfig, name: str, *, is_elsewhere: bool) -> str:
    """Host of the processes of a service that are not listed by address."""
    endpoint: Endpoint = getattr(config.services, name)
    if endpoint.url is not None:
        return urlsplit(endpoint.url).hostname or endpoint.url
    return f"hosts of the {name}'s devices" if is_elsewhere and name in ("trainer", "rollout") else HERE


def external(config: RunConfig) -> dict[str, str]:
    """Addresses of servers that the run uses and Volley does not start."""
    services = config.services
    found = {f"engine {i}": url for i, url in enumerate(config.rollout.engine.urls)}
    found |= {key: server.url for key, server in services.orchestrator.foreign_teachers().items()}
    if services.redis_url is not None and not config.is_supervised:
        found["Redis"] = services.redis_url
    return found


def of_trainer(config: RunConfig, devices: Devices) -> Mapping[str, Any]:
    mesh, kind = config.trainer.mesh, devices.type
    return {
        "device": kind.name,
        "memory": kind.memory,
        "devices": mesh.n_devices,
        "idle": max(0, (devices.count or 0) - mesh.n_devices),
        "mesh": mesh.sizes,
        "processes": config.services.trainer.num_processes,
        "hosts": math.ceil(mesh.n_devices / kind.per_host),
    }


def of_servers(config: RunConfig, devices: Devices, n: int) -> Mapping[str, Any]:
    kind, of_each = devices.type, config.rollout.engine.tp_size
    of_each = 1 if kind.platform == "cpu" else of_each
    n_devices = 1 if kind.platform == "cpu" or kind.share is not None else n * of_each
    return {
        "device": kind.name,
        "memory": kind.memory,
        "servers": n,
        "devices_of_each": of_each,
        "devices": n_devices,
        "idle": max(0, (devices.count or 0) - n_devices),
        "hosts": math.ceil(n_devices / kind.per_host),
    }
