"""`volley access`: evaluated by a real shell, for runs started here, with services of others, and for runs that others
started.
"""

import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest
import yaml

from shared.errors import ConfigError, ServiceUnreachable
from shared.process.ports import free_port
from shared.run import trust
from shared.run.folder import RunFolder
from shared.services_schema import Limits, ServicesSection, Tls
from shared.web.access import AccessTokens, Role, read_tokens
from shared.web.http import create_app
from tests.support.asgi import served
from tests.support.tokens import write_tokens
from volley.printing import json_output
from volley.runs import addresses
from volley_commands import access, status


@asynccontextmanager
async def answering(name):
    async with served(create_app(name, limits=Limits(), tokens=None, ready=lambda: None)) as url:
        yield url


async def shell(script: str, folder: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHON": sys.executable, "FOLDER": folder}
    done = await asyncio.to_thread(
        subprocess.run, ["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["plain", 'it\'s $(touch owned) `x`; "y" \\ *\nz'])
async def test_a_shell_gets_what_it_needs_whatever_the_path(tmp_path, name):
    folder = RunFolder(tmp_path / name)
    folder.path.mkdir()
    tokens = write_tokens(folder.path)
    async with answering("trainer") as url:
        services = ServicesSection(token_files=tokens, tls=Tls(ca_file=folder.path / "ca.pem"))
        addresses.write(folder, {"trainer": url, "rollout-0": "http://127.0.0.1:1"}, {}, services)
        script = (
            'eval "$("$PYTHON" -m volley access "$FOLDER")" && printf "%s|" "$VOLLEY_TRAINER_URL"'
            ' "$VOLLEY_ROLLOUT_0_URL" "$(cat "$VOLLEY_TOKEN_FILE_ADMIN")" "$VOLLEY_CA_FILE"'
        )
        code, output = await shell(script, str(folder.path))
    assert (code, output) == (0, f"{url}|http://127.0.0.1:1|admin-token-of-a-test|{folder.path / 'ca.pem'}|")
    assert "owned" not in os.listdir()


async def test_a_run_that_does_not_run_gives_a_shell_nothing(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    async with answering("env") as url:
        addresses.write(folder, {"trainer": f"http://127.0.0.1:{free_port()}"}, {"env": url}, ServicesSection())
        code, output = await shell('"$PYTHON" -m volley access "$FOLDER" 2>/dev/null', str(tmp_path))
        assert (code, output) == (1, "")
        code, output = await shell('"$PYTHON" -m volley access "$FOLDER"', str(tmp_path))
        assert "is not running: none of its services answers" in output
        assert "`volley up" in output
        code, output = await shell('"$PYTHON" -m volley access --json "$FOLDER"', str(tmp_path))
    told = orjson.loads(output)
    assert (code, told["running"], told["services"]["env"]["external"]) == (1, False, True)


async def test_no_token_is_printed(tmp_path):
    folder = RunFolder(tmp_path)
    tokens = write_tokens(tmp_path)
    async with answering("trainer") as url:
        addresses.write(folder, {"trainer": url}, {}, ServicesSection(token_files=tokens))
        for option in ("", "--json"):
            code, output = await shell(f'"$PYTHON" -m volley access {option} "$FOLDER"', str(tmp_path))
            assert code == 0
            assert "token-of-a-test" not in output


def test_of_a_run_that_others_started_the_configuration_tells(tmp_path):
    folder = RunFolder(tmp_path)
    services = {"env": {"url": "http://env:8101"}, "trainer": {"host": "10.0.0.1"}, "rollout_urls": ["http://far:1/"]}
    services["token_files"] = {"service": "secrets/s", "admin": "/run/secrets/a"}
    folder.config.write_text(
        yaml.safe_dump({"model": {"path": "m"}, "data": {"env": "e"}, "services": services}), encoding="utf-8"
    )
    trust.accept(folder)
    found = addresses.read(folder)
    assert found.urls == {
        "env": "http://env:8101",
        "orchestrator": "http://127.0.0.1:8103",
        "trainer": "http://10.0.0.1:8104",
        "rollout-0": "http://far:1",
    }
    shown = access.variables(folder, found)
    assert shown["VOLLEY_TOKEN_FILE_SERVICE"] == str(Path.cwd() / "secrets/s")
    assert shown["VOLLEY_TOKEN_FILE_ADMIN"] == "/run/secrets/a"
    assert "VOLLEY_TOKEN_FILE_VIEWER" not in shown


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        access.main(tmp_path)


def test_nothing_answers(tmp_path):
    addresses.write(RunFolder(tmp_path), {"trainer": f"http://127.0.0.1:{free_port()}"}, {}, ServicesSection())
    with pytest.raises(ServiceUnreachable, match="volley up"):
        access.main(tmp_path)


@asynccontextmanager
async def run_of(name, tokens):
    """Addresses of trainer and environments of the run."""
    async with AsyncExitStack() as entered:
        urls = {}
        for kind, path, answer in [
            ("trainer", "/status", {"run": name, "phase": "waiting"}),
            ("env", "/environments", {}),
        ]:
            app = create_app(
                kind, limits=Limits(), tokens=tokens, ready=lambda: None, roles={f"GET {path}": Role.VIEWER}
            )
            app.get(path)(lambda answer=answer: answer)
            urls[kind] = await entered.enter_async_context(served(app))
        yield urls


@pytest.mark.parametrize("shared_tokens", [False, True])
async def test_another_run_on_the_same_ports_is_not_the_run(tmp_path, capsys, shared_tokens):
    (tmp_path / "a").mkdir()
    folder, files = RunFolder(tmp_path / "a"), write_tokens(tmp_path / "a")
    tokens = read_tokens(files) if shared_tokens else AccessTokens({Role.VIEWER: "a-token-of-another-run"})
    async with run_of("b", tokens) as urls:
        addresses.write(folder, urls, {}, ServicesSection(token_files=files))
        with pytest.raises(ServiceUnreachable, match="run a is not running; other services answer at its addresses"):
            await asyncio.to_thread(access.main, folder.path)
        with json_output():
            assert await asyncio.to_thread(access.main, folder.path) == 1
        assert orjson.loads(capsys.readouterr().out)["running"] is False
        assert await asyncio.to_thread(status.main, [str(folder.path)]) == 1
        shown = capsys.readouterr().out
        assert "run a is not running; other services answer at its addresses" in shown
        assert "has stopped" not in shown
    async with run_of("a", read_tokens(files)) as urls:
        addresses.write(folder, urls, {}, ServicesSection(token_files=files))
        assert await asyncio.to_thread(access.main, folder.path) == 0
