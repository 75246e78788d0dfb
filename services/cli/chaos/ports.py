"""Ports that stay ours while the process that listens there is dead: below those the kernel gives to outgoing connections."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_RANGE = range(12000, 32000)


def free_port(n: int = 1) -> int:
    """The first of `n` free ports in a row."""
    while True:
        first = random.choice(_RANGE)
        if all(_is_free(first + i) for i in range(n)):
            return first


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
