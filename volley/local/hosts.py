"""One host of a run that takes several, as the processes of its share of the services need it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunHost:
    """One host of several, as `volley.local.stack` needs it.

    The other hosts reach its services at `address`. `counts` are its processes by service. With `redis_port` it runs
    Redis, with the password of the file `redis_password`. Services answer for `linger_s` seconds after the end of the
    run, so that the other hosts notice it.
    """

    address: str
    counts: Mapping[str, int]
    redis_port: int | None = None
    redis_password: Path | None = None
    linger_s: float = 5.0

    @property
    def host(self) -> str:
        """The address as URLs write it."""
        return in_url(self.address)

    @property
    def listen(self) -> str:
        """Address to bind: the host's own if it is a number, all of the host if it is a name."""
        try:
            return str(ipaddress.ip_address(self.address))
        except ValueError:
            return "0.0.0.0"  # noqa: S104 - a name may stand for loopback on its own host


def in_url(address: str) -> str:
    """Return the address as URLs write it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
