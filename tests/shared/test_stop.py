"""SIGTERM while clients hold connections open in every awkward state: the process ends within its
grace, with code 0.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.process.ports import free_port
from shared.services_schema import Tls
from tests.support.tls import make_tls

PROGRAM = """
    import asyncio, sys
    from contextlib import asynccontextmanager
    from fastapi.responses import Response
    from shared import boot
    from shared.web.http import create_app
    from shared.data_schema import DataSection
    from shared.schema import ModelSection, RunConfig
    from shared.services_schema import EnvEndpoint, Limits, ServicesSection, Tls

    port, tls = int(sys.argv[1]), Tls.model_validate_json(sys.argv[2])
    limits = Limits(grace_s=1, header_timeout_s=600, body_timeout_s=600)
    services = ServicesSection(env=EnvEndpoint(port=port), limits=limits, tls=tls)
    config = RunConfig(model=ModelSection(path="x"), data=DataSection(env="e"), services=services)

    @asynccontextmanager
    async def open_service(config):
        app = create_app("env", limits=config.services.limits, tokens=None, ready=lambda: None)
        @app.get("/slow")
        async def slow():
            await asyncio.sleep(600)
        @app.get("/large")
        async def large():
            return Response(b"x" * 2**26)
        yield boot.RunningService(app)
        print("cleaned", flush=True)

    with boot.bind(services.env) as listener:
        print("bound", flush=True)
        raise SystemExit(boot.run(config, open_service, listener))
"""
HELD = {
    "nothing sent": b"",
    "half a head": b"GET /slow HT",
    "half a body": b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc",
    "a body in chunks": b"POST /slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    "a running request": b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n",
    "an answer that is not read": b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n",
    "requests ahead": b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
}


@contextlib.contextmanager
def running(folder: Path, tls: Tls) -> Iterator[tuple[subprocess.Popen[str], int]]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    port, root = free_port(), Path(__file__).parents[2]
    command = [sys.executable, str(folder / "program.py"), str(port), tls.model_dump_json()]
    with subprocess.Popen(
        command, cwd=root, env={"PYTHONPATH": str(root)}, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        try:
            yield process, port
        finally:
            process.kill()


def connect(port: int, tls: Tls) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port), timeout=20)
    return (
        ssl.create_default_context(cafile=tls.ca_file).wrap_socket(link, server_hostname="127.0.0.1")
        if tls.ca_file
        else link
    )


def get_health(port: int, tls: Tls) -> socket.socket:
    """A connection that is kept alive after one answer; waits until the service listens."""
    while True:
        try:
            link = connect(port, tls)
        except ConnectionRefusedError:
            continue
        link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in link.recv(4096)
        return link


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_open_connections_do_not_hold_a_service(tmp_path: Path, encrypted: bool):
    tls = make_tls(tmp_path) if encrypted else Tls()
    with contextlib.ExitStack() as held, running(tmp_path, tls) as (process, port):
        assert process.stdout is not None
        assert process.stdout.readline() == "bound\n"
        held.enter_context(get_health(port, tls))
        held.enter_context(socket.create_connection(("127.0.0.1", port)))
        for sent in HELD.values():
            held.enter_context(connect(port, tls)).sendall(sent)
        held.enter_context(get_health(port, tls))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 0
        assert process.stdout.read() == "cleaned\n"
