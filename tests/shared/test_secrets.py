"""Secrets stay where they are: in no log, no metric, no answer, no command line, no environment,
whatever goes wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from sqlite3 import Connection

import httpx
import pytest
import yaml

from services.orchestrator import store as records_store
from shared.clients.base import HttpClient
from shared.errors import ConfigError, VolleyError
from shared.process import telemetry
from shared.process.ports import free_port
from shared.queue.server import ServerSpec
from shared.services_schema import Limits
from shared.web.access import AccessTokens, Role, read_tokens
from shared.web.http import create_app
from tests.support.asgi import served
from tests.support.net import wait_http
from tests.support.tokens import write_private, write_tokens
from volley.run_arguments import api_key_of
from volley_tinker import futures

ROOT = Path(__file__).parents[2]
TOKENS = {role: f"{role}-token-of-a-test" for role in ("viewer", "service", "admin")}
WRONG = "a-token-of-another-run"
PASSWORD = "a-wrong-password-of-redis"
SECRETS = (*TOKENS.values(), WRONG, PASSWORD)


def expect_no_secret(*texts: str) -> None:
    assert [secret for secret in SECRETS for text in texts if secret in text] == []


@contextlib.contextmanager
def started(service: str, folder: Path, **services: object) -> Iterator[subprocess.Popen[str]]:
    """`python -m services.NAME` with all its output in `folder/log`."""
    tree = {
        "run": {"name": "r", "dir": str(folder)},
        "model": {"path": str(ROOT / "configs/models/tiny"), "initial_weights": "random"},
        "data": {"env": "frozen_lake"},
        "services": {"token_files": write_tokens(folder).model_dump(mode="json"), **services},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = [sys.executable, "-m", f"services.{service}", "--config", str(folder / "run.yaml")]
    with (
        (folder / "log").open("w", encoding="utf-8") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, encoding="utf-8") as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_a_service_tells_no_token_whatever_it_is_asked(tmp_path: Path):
    port = free_port()
    with started("env", tmp_path, env={"port": port}) as process:
        wait_http(f"http://127.0.0.1:{port}/ready")
        answers = []
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            for token in (*TOKENS.values(), WRONG):
                headers = {"Authorization": f"Bearer {token}"}
                for method, path in (
                    ("GET", "/environments"),
                    ("POST", "/environments"),
                    ("GET", "/none"),
                    ("GET", "/metrics"),
                ):
                    answers.append(client.request(method, path, headers=headers, content=b"\xc1"))
        assert {answer.status_code for answer in answers} >= {200, 400, 401, 403}
        facts = [Path(f"/proc/{process.pid}/{name}").read_text(encoding="utf-8") for name in ("cmdline", "environ")]
        process.terminate()
        assert process.wait(60) == 0
    expect_no_secret(*(answer.text for answer in answers), *facts, (tmp_path / "log").read_text(encoding="utf-8"))


@pytest.mark.parametrize("reachable", [True, False])
def test_a_password_that_redis_refuses_is_not_shown(tmp_path: Path, redis_server: ServerSpec, reachable: bool):
    port, own = redis_server.port if reachable else free_port(), free_port()
    password = write_private(tmp_path / "redis_password", PASSWORD)
    services = {
        "redis_url": f"redis://127.0.0.1:{port}/0",
        "redis_password_file": str(password),
        "orchestrator": {"port": own},
    }
    with started("orchestrator", tmp_path, **services) as process:
        if reachable:
            process.wait(60)
        else:
            wait_http(f"http://127.0.0.1:{own}/health")
            answer = httpx.get(
                f"http://127.0.0.1:{own}/runs", headers={"Authorization": f"Bearer {TOKENS['viewer']}"}, trust_env=False
            )
            expect_no_secret(answer.text)
    told = (tmp_path / "log").read_text(encoding="utf-8")
    assert "Redis refuses" in told or not reachable
    expect_no_secret(told)
    assert redis_server.password not in told


async def test_a_bug_tells_no_token(caplog: pytest.LogCaptureFixture):
    app = create_app(
        "demo",
        limits=Limits(),
        tokens=AccessTokens({Role[name.upper()]: token for name, token in TOKENS.items()}),
        ready=lambda: None,
    )

    @app.get("/bug")
    async def bug() -> None:
        raise RuntimeError("the defect")

    with caplog.at_level(logging.DEBUG):
        async with served(app) as url, HttpClient(url, token=TOKENS["admin"]) as client:
            with pytest.raises(VolleyError) as caught:
                await client.get("/bug", attempts=1)
    assert "the defect" in caplog.text
    expect_no_secret(caplog.text, str(caught.value), telemetry.exposition()[0].decode())


def test_objects_that_hold_secrets_do_not_show_them(tmp_path: Path):
    tokens = read_tokens(write_tokens(tmp_path))
    expect_no_secret(repr(tokens), str(tokens), repr(HttpClient("http://x", token=TOKENS["admin"])))


@pytest.mark.parametrize("open_database", [futures.connect, lambda path: records_store._opened(path, "")])
def test_databases_of_requests_and_keys_are_private(tmp_path: Path, open_database: Callable[[Path], Connection]):
    for folder, is_old in ((tmp_path / "new", False), (tmp_path / "old", True)):
        folder.mkdir()
        path = folder / "requests.sqlite"
        if is_old:  # as an earlier version left it, after a crash
            for end in ("", "-wal", "-shm"):
                path.with_name(path.name + end).touch(0o644)
        with contextlib.closing(open_database(path)) as database:
            database.execute("CREATE TABLE more (one)")
            modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()}
        assert modes == dict.fromkeys(["requests.sqlite", "requests.sqlite-wal", "requests.sqlite-shm"], 0o600)


@pytest.mark.parametrize("name", ["volley_serving.serve", "volley_tinker.command"])
def test_an_api_key_is_read_from_a_private_file(tmp_path: Path, name: str):
    parser = argparse.ArgumentParser()
    importlib.import_module(name).add(parser)
    arguments = parser.parse_args(["MODEL", "--api-key-file", str(write_private(tmp_path / "key", "tml-secret"))])
    assert api_key_of(arguments) == "tml-secret"
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"--api-key-file: .*0644"):
        api_key_of(arguments)
    assert api_key_of(parser.parse_args(["MODEL"])) is None
