"""Addresses of remote environments: the URLs that may be submitted, and the IP addresses that may be connected to.

Invariants: a URL with credentials, a query or a fragment is rejected; link-local addresses (the metadata services of
clouds) are never connected to, under any name or spelling. Addresses of this machine and of private networks are
allowed, because most remote environments have them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shared.bounds import MAX_URL
from shared.clients.dialing import open_socket
from shared.errors import InputError

_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_METADATA = tuple(
    map(
        ipaddress.ip_network,
        (
            "169.254.0.0/16",
            "fe80::/10",
            "fd00:ec2::/32",  # AWS
            "fd20:ce::254/128",  # Google Cloud
            "100.100.100.200/32",  # Alibaba Cloud
            "168.63.129.16/32",  # Azure
            "192.0.0.192/32",  # Oracle Cloud
        ),
    )
)
"""Networks of the metadata services of clouds."""
_LAST = (12, 13, 14, 15)
_EMBEDDING = tuple(
    (ipaddress.ip_network(net), at)
    for net, at in (
        ("::/96", _LAST),  # IPv4-compatible
        ("::ffff:0:0/96", _LAST),  # IPv4-mapped
        ("::ffff:0:0:0/96", _LAST),  # IPv4-translated (RFC 2765)
        ("64:ff9b::/96", _LAST),  # NAT64 (RFC 6052)
        ("64:ff9b:1::/48", _LAST),  # NAT64 with a local prefix (RFC 8215), of any RFC 6052 length
        ("64:ff9b:1::/48", (6, 7, 9, 10)),
        ("64:ff9b:1::/48", (7, 9, 10, 11)),
        ("64:ff9b:1::/48", (9, 10, 11, 12)),
        ("2002::/16", (2, 3, 4, 5)),  # 6to4
        ("2001::/32", (4, 5, 6, 7)),  # the Teredo server
    )
)
"""IPv6 networks whose addresses embed an IPv4 address, and the positions of its bytes."""
_TEREDO = ipaddress.ip_network("2001::/32")
_ISATAP = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")
_NUMBERS = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)(?:\.(?:0x[0-9a-f]*|[0-9]+)){0,3}", re.IGNORECASE)
"""IPv4 in libc's notations: one to four parts, decimal, octal or hexadecimal."""

type IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

type AddressInfo = tuple[Any, Any, int, str, Any]
"""A result of getaddrinfo: family, kind, protocol, canonical name, socket address."""


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """A parsed address. `path` is empty, or begins with a slash and ends without one."""

    secure: bool
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        return self.url("https" if self.secure else "http")

    @property
    def origin(self) -> str:
        """Key of tokens: `https://host:port`."""
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
    """Parse a URL. Raises InputError naming the fault, without parts that may be secret."""
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise InputError(f"url: use up to {MAX_URL} printable ASCII characters without blanks")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InputError("url: this is not an address", _HINT) from None
    if parts.scheme not in _PORTS or not host:
        raise InputError("url: its scheme must be http, https, ws or wss, followed by a host", _HINT)
    if "@" in parts.netloc:
        raise InputError("url: credentials are not allowed, because the URL is stored and shown", _CREDENTIALS_HINT)
    if parts.query or parts.fragment:
        raise InputError("url: a query or a fragment is not allowed", _HINT)
    if (reason := why_refused(host)) is not None:
        raise InputError(f"url: {reason}")
    secure = parts.scheme in ("https", "wss")
    return RemoteAddress(secure, host, port or _PORTS[parts.scheme], parts.path.rstrip("/"))


_HINT = "for example http://127.0.0.1:8000"
_CREDENTIALS_HINT = (
    "put the token into the file that services.env.remote_tokens_file names in the service's configuration"
)


def why_refused(host: str) -> str | None:
    """Reason to refuse connections to this address; None if it is allowed, or is a name."""
    found = _parsed(host.partition("%")[0].rstrip("."))
    if found is None:
        return None
    if found.is_unspecified or found.is_multicast or any(map(_is_metadata, (found, *_embedded(found)))):
        return f"{found} is an address that this service does not connect to (link-local, multicast or unspecified)"
    return None


def _is_metadata(address: IpAddress) -> bool:
    return any(address in net for net in _METADATA)


def _parsed(host: str) -> IpAddress | None:
    """IP address of a host; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host)) if _NUMBERS.fullmatch(host) else None
    except OSError:
        return None


def _embedded(address: IpAddress) -> Iterator[ipaddress.IPv4Address]:
    """IPv4 addresses to which packets for an IPv6 address may be routed."""
    if isinstance(address, ipaddress.IPv4Address):
        return
    packed = address.packed
    for net, at in _EMBEDDING:
        if address in net:
            yield ipaddress.IPv4Address(bytes(packed[i] for i in at))
    if address in _TEREDO:
        yield ipaddress.IPv4Address(bytes(byte ^ 0xFF for byte in packed[12:]))
    if packed[8:12] in _ISATAP:
        yield ipaddress.IPv4Address(packed[12:])


def checked_socket(info: AddressInfo) -> socket.socket:
    """Make an unconnected socket for an address. Raises PermissionError if the address is refused."""
    family, kind, protocol, _, address = info
    if (reason := why_refused(str(address[0]))) is not None:
        raise PermissionError(reason)
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    return made


async def connect(address: RemoteAddress, timeout_s: float) -> socket.socket:
    """Connect a socket. Raises OSError."""
    return await open_socket(address.host, address.port, timeout_s, why_refused)
