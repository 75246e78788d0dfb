"""Simulate hosts with network links of a given rate on one machine.

Each host is a network namespace; a bridge joins them with links of one rate in both directions. The benchmark first
moves into its own namespaces, so this machine's network does not change, and everything disappears with the process.
Needs root, `ip` and `tc` (Debian's iproute2).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

_BRIDGE = "hosts"
_NETWORK = "10.213.0"
OWN = f"{_NETWORK}.1"
_BURST_S, _LEAST_BURST = 0.002, 2**17  # a packet before segmentation has up to 64 KiB


def isolate(megabits: float) -> None:
    """Move this thread and its later children onto a host with the address `OWN`.

    Raises OSError, CalledProcessError.
    """
    os.unshare(os.CLONE_NEWNET | os.CLONE_NEWNS)
    _do("mount", "--make-rprivate", "/")
    os.makedirs("/run/netns", exist_ok=True)
    _do("mount", "-t", "tmpfs", "none", "/run/netns")
    _do("ip", "link", "set", "lo", "up")
    _do("ip", "link", "add", _BRIDGE, "type", "bridge")
    _do("ip", "address", "add", f"{OWN}/24", "dev", _BRIDGE)
    _do("ip", "link", "set", _BRIDGE, "up")
    _bound(megabits, _BRIDGE)  # limits what this host sends itself, not what it forwards


def add_host(number: int, megabits: float) -> tuple[str, Sequence[str]]:
    """Add a host. Returns its address, and the prefix of commands that run on it. Raises CalledProcessError."""
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
