"""An embedded server of the queue beside a tool or a test."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import QueueUnavailable
from shared.queue.server import ServerSpec, folder_lock, last_lines, prepare


@contextmanager
def running(spec: ServerSpec, ready_s: float = 20.0, stop_s: float = 10.0) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server and wait until it has loaded its data and answers; stop it at the end.

    Blocks for the start (about 0.1 s plus loading) and for the stop. The process ignores the terminal's signals, so
    Ctrl-C stops it only through the end of this context.

    Raises:
        ConfigError: another server uses the folder.
        QueueUnavailable: it did not become ready in `ready_s` seconds; the message ends with its last log lines.
    """
    with folder_lock(spec.folder) as lock, spec.log.open("ab") as log:
        process = subprocess.Popen(
            spec.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock,), process_group=0
        )
    try:
        _wait_ready(spec, process, ready_s)
        yield process
    finally:
        _stop(process, stop_s)


@contextmanager
def embedded_server(folder: Path) -> Iterator[ServerSpec]:
    """Run an embedded server in `folder`, at a free port, within the context. Raises as `prepare` and `running`."""
    spec = prepare(folder)
    with running(spec):
        yield spec


def _wait_ready(spec: ServerSpec, process: subprocess.Popen[bytes], ready_s: float) -> None:
    end = time.monotonic() + ready_s
    while not _answers(spec):
        if process.poll() is not None:
            raise QueueUnavailable(f"the embedded server ended with code {process.returncode}", last_lines(spec.log))
        if time.monotonic() > end:
            raise QueueUnavailable(f"the embedded server was not ready in {ready_s:g} s", last_lines(spec.log))
        time.sleep(0.01)


def _answers(spec: ServerSpec) -> bool:
    """True if this server (it knows the password) has loaded its data."""
    command = f"AUTH {spec.password}\r\nPING\r\n".encode()
    with suppress(OSError), socket.create_connection(("127.0.0.1", spec.port), timeout=1.0) as link:
        link.sendall(command)
        link.settimeout(1.0)
        answer = b""
        while answer.count(b"\r\n") < 2:
            part = link.recv(256)
            if not part:
                return False
            answer += part
        return answer == b"+OK\r\n+PONG\r\n"
    return False


def _stop(process: subprocess.Popen[bytes], stop_s: float) -> None:
    """Terminate the server so that it flushes its append-only file; kill it after `stop_s` seconds."""
    process.terminate()
    try:
        process.wait(stop_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
