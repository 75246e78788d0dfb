"""Ports that stay ours while the process that listens there is dead: below those the kernel gives to outgoing connections."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_RANGE = range(12000, 32000)


def hold(host: str, port: int) -> socket.socket:
    """Binds a port until the socket is closed. Raises OSError if it is taken, or the address is not ours."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def hold_free(host: str, before: int | None = None) -> socket.socket:
    """Binds the port `before`, if it is given and free, else any free one. Raises OSError if none can be had."""
    for port in ([] if before is None else [before]) + random.sample(_RANGE, 64):
        with suppress(OSError, OverflowError):
            return hold(host, port)
    return hold(host, 0)


def free_port(before: int | None = None) -> int:
    """A port of this host's loopback address that is free now: `before`, if it is given and free."""
    with hold_free("127.0.0.1", before) as listener:
        return int(listener.getsockname()[1])
