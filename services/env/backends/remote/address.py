"""Where a remote environment is: which URLs may be submitted, and which addresses the service connects to for them.

Invariants: no URL with credentials, a query or a fragment is kept; no connection is made to a link-local address (the
metadata services of clouds are there), whatever name or spelling leads to it. Addresses of the own machine and of
private networks are allowed: remote environments are mostly there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shared.errors import InputError

MAX_URL = 500
_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_METADATA = tuple(ipaddress.ip_network(net) for net in ("169.254.0.0/16", "fe80::/10", "fd00:ec2::/32"))

type AddressInfo = tuple[Any, Any, int, str, Any]
"""What getaddrinfo says: family, kind, protocol, canonical name, socket address."""


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """`path` begins with a slash and ends without one, or is empty."""

    secure: bool
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        return self.url("https" if self.secure else "http")

    @property
    def origin(self) -> str:
        """What tokens are kept by: `https://host:port`."""
        return f"{'https' if self.secure else 'http'}://{self._authority}"

    @property
    def websocket(self) -> str:
        return self.url("wss" if self.secure else "ws")

    def url(self, scheme: str) -> str:
        return f"{scheme}://{self._authority}{self.path}"

    @property
    def _authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(url: str) -> RemoteAddress:
    """Raises InputError naming what is wrong with the URL, without what may be a secret in it."""
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise InputError(f"url: up to {MAX_URL} printable ASCII characters without blanks are taken")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InputError("url: this is no address", _HINT) from None
    if parts.scheme not in _PORTS or not host:
        raise InputError("url: its scheme must be http, https, ws or wss, followed by a host", _HINT)
    if "@" in parts.netloc:
        raise InputError("url: credentials do not belong there, it is stored and shown", _CREDENTIALS_HINT)
    if parts.query or parts.fragment:
        raise InputError("url: it may have no query and no fragment", _HINT)
    if (reason := why_refused(host)) is not None:
        raise InputError(f"url: {reason}")
    secure = parts.scheme in ("https", "wss")
    return RemoteAddress(secure, host, port or _PORTS[parts.scheme], parts.path.rstrip("/"))


_HINT = "for example http://127.0.0.1:8000"
_CREDENTIALS_HINT = (
    "services.env.remote_token_files in the service's configuration names the token's file for an address"
)


def why_refused(host: str) -> str | None:
    """Why no connection to this address is made; None if it may be, or is a name whose addresses are not known yet."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_unspecified or found.is_multicast or any(found in net for net in _METADATA):
        return f"{found} is an address that this service does not connect to (link-local, multicast or unspecified)"
    return None


def checked_socket(info: AddressInfo) -> socket.socket:
    """A socket for that address, not connected. Raises PermissionError where no connection is made to it."""
    family, kind, protocol, _, address = info
    if (reason := why_refused(str(address[0]))) is not None:
        raise PermissionError(reason)
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    return made


async def connect(address: RemoteAddress, timeout_s: float) -> socket.socket:
    """A connected socket. Raises OSError."""
    async with asyncio.timeout(timeout_s):
        return await _connect(address)


async def _connect(address: RemoteAddress) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure = OSError("the host has no address")
    for info in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        try:
            made = checked_socket(info)
        except OSError as error:
            failure = error
            continue
        try:
            await loop.sock_connect(made, info[4])
        except OSError as error:
            made.close()
            failure = error
        except BaseException:
            made.close()
            raise
        else:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
    raise failure
