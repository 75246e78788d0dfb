"""Ports that stay ours while the process that listens there is dead: below those the kernel gives to outgoing
connections.
"""

from __future__ import annotations

import errno
import random
import socket

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
        try:
            return hold(host, port)
        except OverflowError:
            continue
        except OSError as error:
            if host_problem(error) is not None:
                raise
    return hold(host, 0)


def host_problem(error: Exception) -> str | None:
    """What is wrong with the address that could not be bound, whichever the port; None if the port is what cannot be
    had.
    """
    if isinstance(error, socket.gaierror):
        return "this name cannot be resolved"
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return "this is no address of this machine"
    return None


def free_port(before: int | None = None) -> int:
    """A port of this host's loopback address that is free now: `before`, if it is given and free."""
    with hold_free("127.0.0.1", before) as listener:
        return int(listener.getsockname()[1])
