"""Hosts on one machine: each a network namespace, all joined by a bridge, with links of one rate in both directions.

The bench that uses it moves into namespaces of its own first, so that nothing of this machine's network is changed and
everything is gone with its process. Needs root, `ip` and `tc` (Debian's iproute2).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

_BRIDGE = "hosts"
_NETWORK = "10.213.0"
OWN = f"{_NETWORK}.1"
_BURST_S, _LEAST_BURST = 0.002, 2**17  # a packet that the kernel has not cut yet has 64 KiB


def isolate(megabits: float) -> None:
    """Moves this thread, and all that it starts, onto a host with the address `OWN`. Raises OSError,
    CalledProcessError.
    """
    os.unshare(os.CLONE_NEWNET | os.CLONE_NEWNS)
    _do("mount", "--make-rprivate", "/")
    os.makedirs("/run/netns", exist_ok=True)
    _do("mount", "-t", "tmpfs", "none", "/run/netns")
    _do("ip", "link", "set", "lo", "up")
    _do("ip", "link", "add", _BRIDGE, "type", "bridge")
    _do("ip", "address", "add", f"{OWN}/24", "dev", _BRIDGE)
    _do("ip", "link", "set", _BRIDGE, "up")
    _bound(megabits, _BRIDGE)  # of what this host sends itself; what it passes on for others takes no part in it


def add_host(number: int, megabits: float) -> tuple[str, Sequence[str]]:
    """Another host's address, and what a command begins with that is to run there. Raises CalledProcessError."""
    name, address = f"host{number}", f"{_NETWORK}.{number + 2}"
    inside = ("ip", "netns", "exec", name)
    _do("ip", "netns", "add", name)
    _do("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
    _do("ip", "link", "set", f"to-{name}", "master", _BRIDGE, "up")
    _do(*inside, "ip", "link", "set", "lo", "up")
    _do(*inside, "ip", "address", "add", f"{address}/24", "dev", "eth0")
    _do(*inside, "ip", "link", "set", "eth0", "up")
    _bound(megabits, f"to-{name}")
    _bound(megabits, "eth0", *inside)
    return address, inside


def _bound(megabits: float, device: str, *inside: str) -> None:
    burst = max(_LEAST_BURST, int(megabits * 1e6 / 8 * _BURST_S))
    rate = ("rate", f"{megabits}mbit", "burst", str(burst), "latency", "5ms")
    _do(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")
