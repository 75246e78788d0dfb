"""Hosts of a bench on this machine: their links are as slow as asked for, and nothing of it is seen outside."""

import json
import os
import shutil
import subprocess
import sys

import pytest

N_BYTES, MEGABITS = 4_000_000, 80.0
PROGRAM = f"""
import json, socket, subprocess, sys, time
from tools.bench import links

def timed(receiver, inside):
    code = "import socket, sys; socket.create_connection((sys.argv[1], 7000)).sendall(bytes({N_BYTES}))"
    with socket.create_server((receiver, 7000)) as listener:
        sender = subprocess.Popen([*inside, sys.executable, "-c", code, receiver])
        near, (address, _) = listener.accept()
        begun, n = time.monotonic(), 0
        while block := near.recv(2**16):
            n += len(block)
        sender.wait()
        return n, time.monotonic() - begun, address

links.isolate({MEGABITS})
(one, inside), _ = (links.add_host(i, {MEGABITS}) for i in range(2))
print(json.dumps([*timed(links.OWN, inside), one]))
"""


def refused() -> str | None:
    """Why such hosts cannot be made here."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "unshare", "mount"))):
        return "needs root, ip and tc"
    made = (
        "ip link add name x0 type bridge && ip link add name x1 type veth peer name x2 && tc qdisc add dev x1 root tbf"
    )
    tried = subprocess.run(
        ["unshare", "-n", "-m", "sh", "-c", f"{made} rate 8mbit burst 128kb latency 5ms"],
        capture_output=True,
        check=False,
    )
    return None if tried.returncode == 0 else "this machine makes no network namespaces with bounded links"


def test_a_link_carries_no_more_than_its_rate_and_nothing_of_it_is_seen_outside() -> None:
    if (reason := refused()) is not None:
        pytest.skip(reason)
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, encoding="utf-8", check=True).stdout
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    n, seconds, address, host = json.loads(done.stdout)
    assert (n, address) == (N_BYTES, host)
    assert seconds > 0.8 * N_BYTES * 8 / (MEGABITS * 1e6)
    assert subprocess.run(["ip", "-o", "link"], capture_output=True, encoding="utf-8", check=True).stdout == before
