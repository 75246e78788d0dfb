"""Connect to hosts with several addresses, some of which may be dead."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

HEAD_START_S = 0.25
"""Delay before the next address is tried in parallel, in seconds (RFC 8305)."""


async def open_socket(
    host: str, port: int, timeout_s: float, why_refused: Callable[[str], str | None] = lambda address: None
) -> socket.socket:
    """Connect to the first address of the host that answers.

    Args:
        timeout_s: for the look-up of the name and all attempts together, in seconds.
        why_refused: returns why no connection may be made to an IP address; None allows it.

    Raises:
        PermissionError: every address is refused.
        OSError: no address answered; TimeoutError among them.
    """
    from aiohappyeyeballs import start_connection

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        reasons = [why_refused(str(info[4][0])) for info in found]
        allowed = [info for info, reason in zip(found, reasons, strict=True) if reason is None]
        if not allowed:
            raise PermissionError(next(filter(None, reasons), f"{host} has no address"))
        made = await start_connection(allowed, happy_eyeballs_delay=HEAD_START_S, interleave=1, loop=loop)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
