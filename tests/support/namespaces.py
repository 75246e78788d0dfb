"""Network namespaces that stand for hosts: each has a loopback of its own, and reaches the others by a bridge."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

LOOPBACK = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")


@contextmanager
def hosts(n: int) -> Iterator[Sequence[str]]:
    """Yield `n` addresses: those of namespaces named after them, else of loopback where none can be made."""
    number = os.getpid() % 200
    switch, addresses = f"volley-{os.getpid()}", [f"10.213.{number}.{i + 2}" for i in range(n)]
    with ExitStack() as made:
        try:
            _ip(made, f"netns add {switch}", f"netns del {switch}")  # rules of this machine's firewall do not reach it
            _ip(made, f"-n {switch} link add bridge type bridge")
            _ip(made, f"-n {switch} link set bridge up")
            for i, address in enumerate(addresses):
                _ip(made, f"netns add {address}", f"netns del {address}")
                _ip(made, f"-n {switch} link add host{i} type veth peer name eth0 netns {address}")
                _ip(made, f"-n {switch} link set host{i} master bridge up")
                _ip(made, f"-n {address} addr add {address}/24 dev eth0")
                _ip(made, f"-n {address} link set eth0 up")
                _ip(made, f"-n {address} link set lo up")
        except (OSError, subprocess.CalledProcessError):
            made.close()
            addresses = list(LOOPBACK[:n])
        yield addresses


def _ip(made: ExitStack, command: str, undo: str = "") -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=20)
    if undo:
        made.callback(subprocess.run, ["ip", *undo.split()], check=False, capture_output=True, timeout=20)
