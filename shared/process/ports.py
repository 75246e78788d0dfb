"""Ports that stay reserved while the process that listens there is dead.

They lie below the kernel's range for outgoing connections, in a block that no other process of this user takes ports
from while this process lives.
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
    """Block of ports of this process, reserved by a lock on one byte of a file until the process ends.

    Without a free byte, the block is shared with another process.
    """

    lock: int | None = field(default_factory=lambda: _opened())
    ports: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        numbers = random.sample(range(_N_BLOCKS), _N_BLOCKS)
        number = next((n for n in numbers if self.lock is not None and _is_ours(self.lock, n)), numbers[0])
        first = _FIRST + number * _BLOCK
        self.ports = cycle(random.sample(range(first, first + _BLOCK), _BLOCK))


def hold(host: str, port: int) -> socket.socket:
    """Bind a port until the socket is closed.

    Raises OSError if it is taken, or the address is not one of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def hold_free(host: str, before: int | None = None) -> socket.socket:
    """Bind the port `before`, if given and free, else one that this process has not used for long.

    Raises OSError without one.
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
    """Describe a problem with the address that could not be bound; None if the port is the problem."""
    if isinstance(error, socket.gaierror):
        return "this name cannot be resolved"
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return "this is not an address of this machine"
    return None


def free_port(before: int | None = None) -> int:
    """Return a free port of the loopback address: `before`, if given and free."""
    with hold_free("127.0.0.1", before) as listener:
        return int(listener.getsockname()[1])


@cache
def _block_of(_pid: int) -> _Block:
    """Return this process's block; it depends on the pid because a fork does not inherit its parent's locks."""
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
