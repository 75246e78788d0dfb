"""TLS by configuration, with a certificate authority made for the test."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import yaml

from shared import config
from shared.clients.base import HttpClient
from shared.errors import ConfigError, QueueUnavailable, ServiceUnreachable, TlsFailed
from shared.process.ports import free_port
from shared.queue.client import command, connect
from shared.queue.server import ServerSpec
from shared.services_schema import Limits, ServicesSection, Tls
from shared.web.http import create_app
from shared.web.tls import check_certificate, client_context
from tests.support.asgi import served
from tests.support.tls import make_tls

LIMITS = Limits(grace_s=1)


def make_app():
    return create_app("demo", limits=LIMITS, tokens=None, ready=lambda: None)


async def test_a_service_is_reached_by_whoever_trusts_its_authority(tmp_path: Path):
    tls = make_tls(tmp_path)
    async with served(make_app(), ServicesSection(limits=LIMITS, tls=tls)) as url:
        assert url.startswith("https://127.0.0.1:")
        async with HttpClient(url, ca_file=tls.ca_file) as client:
            assert (await client.get("/health"))["status"] == "ok"


async def test_it_is_refused_by_whoever_trusts_only_others(tmp_path: Path):
    other = make_tls(tmp_path / "other")
    async with served(make_app(), ServicesSection(limits=LIMITS, tls=make_tls(tmp_path))) as url:
        for ca_file in (None, other.ca_file):
            async with HttpClient(url, ca_file=ca_file) as client:
                with pytest.raises(TlsFailed, match=r"its certificate was rejected.*ca_file"):
                    await client.get("/health", attempts=1)


async def test_a_certificate_of_another_name_is_refused(tmp_path: Path):
    tls = make_tls(tmp_path, "rollout.example")
    async with (
        served(make_app(), ServicesSection(limits=LIMITS, tls=tls)) as url,
        HttpClient(url, ca_file=tls.ca_file) as client,
    ):
        with pytest.raises(ServiceUnreachable, match="IP address mismatch"):
            await client.get("/health", attempts=1)


async def test_plain_http_is_refused(tmp_path: Path):
    async with (
        AsyncExitStack() as stack,
        served(make_app(), ServicesSection(limits=LIMITS, tls=make_tls(tmp_path))) as url,
    ):
        client = await stack.enter_async_context(HttpClient(url.replace("https:", "http:")))
        with pytest.raises(ServiceUnreachable):
            await client.get("/health", attempts=1)


async def test_a_handshake_that_never_comes_is_cut(tmp_path: Path):
    hurried = LIMITS.model_copy(update={"header_timeout_s": 0.5})
    async with served(make_app(), ServicesSection(limits=hurried, tls=make_tls(tmp_path))) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


def test_a_whole_service_over_tls(tmp_path: Path):
    """The process, its address from the configuration, and SIGTERM while a connection is open."""
    tls, port = make_tls(tmp_path), free_port()
    tree = {
        "run": {"dir": str(tmp_path)},
        "model": {"path": "x"},
        "data": {"env": "frozen_lake"},
        "services": {"env": {"port": port}, "tls": tls.model_dump(mode="json"), "limits": {"grace_s": 1}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    url = config.validate(tree).config.services.base_url("env")
    assert url == f"https://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "services.env", "--config", str(tmp_path / "c.yaml")], stderr=subprocess.DEVNULL
    )

    async def ask() -> None:
        async with asyncio.timeout(200), HttpClient(url, ca_file=tls.ca_file) as client:
            while True:
                try:
                    assert len((await client.get("/environments", attempts=1))["environments"]) >= 3
                    break
                except ServiceUnreachable:
                    await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0

    try:
        asyncio.run(ask())
    finally:
        process.kill()
        process.wait()


def write_other_key(folder: Path, tls: Tls) -> Tls:
    return tls.model_copy(update={"key_file": make_tls(folder / "other").key_file})


def encrypt_key(folder: Path, tls: Tls) -> Tls:
    encrypted = folder / "encrypted.pem"
    command = ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", str(tls.key_file), "-out", str(encrypted)]
    if subprocess.run(command, capture_output=True).returncode:
        command[1] = "ec"
        subprocess.run(command, capture_output=True, check=True)
    encrypted.chmod(0o600)
    return tls.model_copy(update={"key_file": encrypted})


def open_key(folder: Path, tls: Tls) -> Tls:
    os.chmod(str(tls.key_file), 0o644)
    return tls


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (write_other_key, "key values mismatch"),
        (encrypt_key, "must not be encrypted"),
        (open_key, "mode 0644"),
        (lambda folder, tls: tls.model_copy(update={"cert_file": folder / "none"}), "No such file"),
        (lambda folder, tls: tls.model_copy(update={"cert_file": tls.key_file}), "cannot be used"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_found_before_the_start(tmp_path: Path, spoil, reason: str):
    tls = make_tls(tmp_path)
    check_certificate(tls)
    with pytest.raises(ConfigError, match=reason):
        check_certificate(spoil(tmp_path, tls))


def test_certificate_and_key_come_together(tmp_path: Path):
    with pytest.raises(ConfigError, match="cert_file and key_file together"):
        config.validate({"model": {"path": "x"}, "data": {"env": "e"}, "services": {"tls": {"cert_file": "/a"}}})
    (tmp_path / "empty.pem").write_text("nothing", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no certificates"):
        client_context(tmp_path / "empty.pem")


@asynccontextmanager
async def tls_in_front_of(port: int, tls: Tls) -> AsyncIterator[int]:
    """A port that speaks TLS and passes on to `port`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(str(tls.cert_file), str(tls.key_file))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back[1]), pump(back[0], writer), return_exceptions=True)

    async with await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


async def test_redis_over_tls_needs_its_authority(tmp_path: Path, redis_server: ServerSpec):
    tls = make_tls(tmp_path)
    async with tls_in_front_of(redis_server.port, tls) as port:
        url = f"rediss://:{redis_server.password}@127.0.0.1:{port}/0"
        async with connect(url, ca_file=tls.ca_file) as redis:
            assert await command(redis, "PING")
        async with connect(url) as redis:
            with pytest.raises(QueueUnavailable, match="certificate verify failed"):
                await command(redis, "PING")
