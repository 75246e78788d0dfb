"""Ports that stay ours while the process that listens there is dead: below those the kernel gives to outgoing
connections, and from a block that no other process of this user chooses from while we live.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, cycle, islice

_FIRST, _BLOCK, _N_BLOCKS = 12_000, 250, 80


@dataclass(eq=False)
class _Block:
    """Ports of this process: one byte of a file is locked for it, until it ends, however that is. Where no byte can be
    had, the block is another process's as well.
    """

    lock: int | None = field(default_factory=lambda: _opened())
    ports: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        numbers = random.sample(range(_N_BLOCKS), _N_BLOCKS)
        number = next((n for n in numbers if self.lock is not None and _is_ours(self.lock, n)), numbers[0])
        first = _FIRST + number * _BLOCK
        self.ports = cycle(random.sample(range(first, first + _BLOCK), _BLOCK))


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
    """Binds the port `before`, if it is given and free, else one that this process has not chosen for long. Raises
    OSError if none can be had.
    """
    chosen = islice(_block_of(os.getpid()).ports, _BLOCK)
    for port in chain([] if before is None else [before], chosen):
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


@cache
def _block_of(_pid: int) -> _Block:
    """A fork has no locks of its parent's."""
    return _Block()


def _opened() -> int | None:
    path = os.path.join(tempfile.gettempdir(), f"volley-ports-{os.getuid()}")
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


def _is_ours(lock: int, number: int) -> bool:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except OSError:
        return False
    return True
