"""Ports of the local services: those the user named must be free, the rest are chosen."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import ConfigError
from shared.schema import Services


def choose(services: Services, given: Mapping[str, Any], n_rollout: int) -> dict[str, list[int]]:
    """Ports by service; several for rollout, in a row if the user named the first.

    Args:
        given: the section `services` as the user wrote it; a port named there is kept.

    Raises:
        ConfigError: a port the user named is taken.
    """
    counts = {"env": 1, "rollout": n_rollout, "orchestrator": 1, "trainer": 1}
    ports: dict[str, list[int]] = {}
    with contextlib.ExitStack() as held:
        for name, n in counts.items():
            endpoint = getattr(services, name)
            first = int((given.get(name) or {}).get("port") or 0)
            wanted = [first + i if first else 0 for i in range(n)]
            ports[name] = [_hold(held, endpoint.host, port, name) for port in wanted]
    return ports


def _hold(held: contextlib.ExitStack, host: str, port: int, name: str) -> int:
    """Binds a port (0: any) until all are chosen, so that no two services get the same."""
    listener = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"services.{name}.port={port}: {host}:{port} cannot be used ({error.strerror})",
            f"another program may use it; choose another port, or leave services.{name}.port out to get a free one",
        ) from error
    return int(listener.getsockname()[1])


def urls(services: Services, ports: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Base address of every process by its name: env, rollout-0, …, orchestrator, trainer."""
    found = {}
    for name, numbers in ports.items():
        for i, port in enumerate(numbers):
            found[f"rollout-{i}" if name == "rollout" else name] = services.local_url(name, port)
    return found
