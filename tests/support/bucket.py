"""A server of S3's protocol on a port of this machine, as a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from shared.process.ports import free_port
from tests.support.net import wait_http
from volley_bucket.objects import Bucket


@contextmanager
def s3_server(port: int | None = None) -> Iterator[dict[str, str]]:
    """The environment variables with which it is found; it has the bucket `volley`."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_http(f"{url}/moto-api/")
        httpx.put(f"{url}/volley", trust_env=False).raise_for_status()
        yield {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "s3cret"}
    finally:
        process.kill()
        process.wait()


def own_prefix(server: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """On an `s3_server`, named like a test's folder; for programs that the test starts as well."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return Bucket(f"s3://volley/{folder.parent.name}/{folder.name}")
