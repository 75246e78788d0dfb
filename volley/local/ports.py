"""Ports of the local services.

A port that the user names must be free. For the others, the port of the last session is used if it is free.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.errors import ConfigError
from shared.process.ports import hold, hold_free, host_problem
from shared.services import SERVICES
from shared.services_schema import ServicesSection


def choose(
    services: ServicesSection,
    given: Mapping[str, Any],
    counts: Mapping[str, int],
    before: Mapping[str, int] | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, list[int]]:
    """Choose ports by service; a replicated service gets several, consecutive if the user named the first.

    Args:
        given: the section `services` as the user wrote it; ports named there are used.
        counts: processes by service.
        before: ports of the last session by process name; used again if free.
        say: called with a line for each process whose port changes.

    Raises:
        ConfigError: a port that the user named is in use.
    """
    ports: dict[str, list[int]] = {}
    with contextlib.ExitStack() as held:
        for service, n in counts.items():
            host: str = getattr(services, service).host
            first = int((given.get(service) or {}).get("port") or 0)
            ports[service] = []
            for i in range(n):
                name = SERVICES[service].process(i)
                old = (before or {}).get(name)
                listener = held.enter_context(
                    _named(service, host, first + i) if first else _chosen(service, host, old)
                )
                port = int(listener.getsockname()[1])
                ports[service].append(port)
                if not first and old not in (None, port):
                    say(f"{name} now listens on port {port}, because another program uses its previous port {old}")
    return ports


def _named(service: str, host: str, port: int) -> socket.socket:
    try:
        return hold(host, port)
    except (OSError, OverflowError) as error:
        if (problem := host_problem(error)) is not None:
            raise _unusable(service, host, problem) from error
        raise ConfigError(
            f"services.{service}.port={port}: {host}:{port} cannot be used"
            f" ({getattr(error, 'strerror', None) or error})",
            f"another program may use it; choose another port, or remove services.{service}.port to get a free one",
        ) from error


def _chosen(service: str, host: str, before: int | None) -> socket.socket:
    """Socket on a free port; held until all ports are chosen, so that no two services get the same."""
    try:
        return hold_free(host, before)
    except OSError as error:
        raise _unusable(service, host, host_problem(error) or str(error.strerror)) from error


def _unusable(service: str, host: str, problem: str) -> ConfigError:
    return ConfigError(
        f"services.{service}.host={host}: cannot listen there: {problem}", "name an address of this machine"
    )


def urls(services: ServicesSection, ports: Mapping[str, Sequence[int]], address: str | None = None) -> dict[str, str]:
    """Base address of every process by name; `address` is how other hosts reach this one, if they do."""
    return {
        SERVICES[service].process(i): services.local_url(service, port, address)
        for service, all_of in ports.items()
        for i, port in enumerate(all_of)
    }
