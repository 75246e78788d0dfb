"""`volley serve`: what it refuses, what it hands to the service, and one real server."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
import pytest

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app, open_rollout
from services.rollout.engines.base import EngineSpec
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared import config
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.run import trust
from shared.run.folder import RunFolder
from shared.web.access import Role, read_tokens
from tests.support import models
from tests.support.engine import FakeEngine
from tests.support.tokenizer import FOLDER
from volley.__main__ import parse_arguments
from volley_serving import serve
from volley_serving.serve import ServeOptions
from volley_serving.server import standalone

VERSION = "e000001-s000003"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = models.tiny_config()
    folder = models.write_hf(tmp_path / "model", config, models.random_weights(config, 0))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    return folder


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    (folder := tmp_path / "temporary").mkdir()
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    folder = RunFolder(tmp_path / "runs" / "old")
    folder.path.mkdir(parents=True)
    tree = f"run: {{name: old, dir: {folder.path.parent}}}\nmodel: {{path: {model}}}\ndata: {{env: sums}}\n"
    folder.config.write_text(tree, encoding="utf-8")
    folder.record.write_text("{}", encoding="utf-8")
    weights = models.random_weights(models.tiny_config(), 0)
    models.write_checkpoint(folder.checkpoints, VERSION, models.tiny_config(), weights, run="old")
    return folder.path


def test_a_folder_is_served_with_its_own_weights(model: Path, temporary: Path) -> None:
    served = serve.prepare(str(model), ServeOptions(dtype="bfloat16"), temporary)
    settings = standalone(config.load([served.folder.config]).config)
    assert settings.engine.load_weights
    assert (settings.engine.model_path, settings.engine.dtype) == (str(model), "bfloat16")
    assert settings.engine.context_length == models.tiny_config()["max_position_embeddings"]
    assert (settings.first, settings.weights_root, settings.redis_url, settings.follows) == (None, None, None, False)
    assert settings.model_name == ""


def test_the_token_has_every_role_and_a_private_file(model: Path, temporary: Path) -> None:
    served = serve.prepare(str(model), ServeOptions(), temporary)
    files = served.loaded.config.services.token_files
    tokens = read_tokens(files)
    assert tokens is not None
    assert tokens.role_of(f"Bearer {served.token}".encode()) is Role.ADMIN
    assert files.admin is not None
    assert stat.S_IMODE(files.admin.stat().st_mode) == 0o600
    assert str(served.token) in "\n".join(serve.ready_lines(served, 1.0))


@pytest.mark.parametrize(("key", "token"), [("", None), ("my-own-key-of-16", "my-own-key-of-16")])
def test_a_token_is_chosen_or_left_out(model: Path, temporary: Path, key: str, token: str | None) -> None:
    served = serve.prepare(str(model), ServeOptions(api_key=key), temporary)
    assert served.token == token
    assert (read_tokens(served.loaded.config.services.token_files) is None) == (token is None)
    assert ("Authorization" in "\n".join(serve.ready_lines(served, 1.0))) == (token is not None)


@pytest.mark.parametrize("version", ["", f"@{VERSION}", "@latest"])
def test_a_version_of_a_run_is_served(run: Path, temporary: Path, version: str) -> None:
    trust.accept(RunFolder(run))
    served = serve.prepare(f"{run}{version}", ServeOptions(), temporary)
    settings = standalone(config.load([served.folder.config]).config)
    assert not settings.engine.load_weights
    assert settings.first == run / "checkpoints" / VERSION
    assert (settings.run, settings.model_name) == ("old", f"old@{VERSION}")


async def test_the_version_is_loaded_before_the_server_answers(run: Path, temporary: Path) -> None:
    trust.accept(RunFolder(run))
    settings = standalone(serve.prepare(f"{run}@{VERSION}", ServeOptions(api_key=""), temporary).loaded.config)
    engine = FakeEngine()

    @asynccontextmanager
    async def open_engine(_: EngineSpec) -> AsyncIterator[FakeEngine]:
        yield engine

    async with open_rollout(settings, open_engine) as service:
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            info = (await http.get("/model_info")).json()
    assert engine.loaded == [VERSION]
    assert (info["weight_version"], info["served_model_name"]) == (VERSION, f"old@{VERSION}")


def test_options_of_the_command_line_reach_the_service(model: Path, temporary: Path) -> None:
    line = [str(model), "--context-length", "99", "--weights-root", str(model.parent), "--no-token"]
    arguments = parse_arguments(["serve", *line, "rollout.engine.max_running_requests=3"])
    options = ServeOptions(
        context_length=arguments.context_length, weights_root=arguments.weights_root, overrides=arguments.overrides
    )
    assert arguments.no_token
    settings = standalone(serve.prepare(str(model), options, temporary).loaded.config)
    assert (settings.engine.context_length, settings.engine.max_running_requests) == (99, 3)
    assert settings.weights_root == model.parent


def _without_weights(model: Path) -> str:
    (model / "model.safetensors").unlink()
    return str(model)


@pytest.fixture
def taken() -> Iterator[int]:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_wrong_model_is_named(model: Path, run: Path, temporary: Path) -> None:
    cases = {"./nothing": "nothing is no folder", f"{model}@{VERSION}": "has no checkpoint"}
    for target, words in cases.items():
        with pytest.raises(ConfigError, match=words) as refused:
            serve.prepare(target, ServeOptions(), temporary)
        assert "model.path" not in str(refused.value)
    with pytest.raises(ConfigError, match="--trust"):
        serve.prepare(str(run), ServeOptions(), temporary)
    trust.accept(RunFolder(run))
    with pytest.raises(ConfigError, match="e000009-s000009 is not retained"):
        serve.prepare(f"{run}@e000009-s000009", ServeOptions(), temporary)
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors") as refused:
        serve.prepare(_without_weights(model), ServeOptions(), temporary)
    assert "initial_weights" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ServeOptions(api_key="short"), "API key"),
        (ServeOptions(weights_root=Path("/nowhere")), "--weights-root"),
        (ServeOptions(host="192.0.2.1"), "--host"),
        (ServeOptions(port=99_999), "--port"),
        (ServeOptions(context_length=0), "context_length"),
    ],
)
def test_a_wrong_option_is_named(model: Path, temporary: Path, options: ServeOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serve.prepare(str(model), options, temporary)


def test_a_port_in_use_is_named(model: Path, temporary: Path, taken: int) -> None:
    with pytest.raises(ConfigError, match=f"--port {taken}"):
        serve.prepare(str(model), ServeOptions(port=taken), temporary)


def test_without_the_environment_of_the_engine_nothing_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLLEY_VENVS", str(model))
    with pytest.raises(ConfigError, match="make install"):
        serve.main(str(model), ServeOptions())


async def test_a_model_without_a_chat_template_continues_texts(model: Path, temporary: Path) -> None:
    names = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    del names["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    served = serve.prepare(str(model), ServeOptions(api_key=""), temporary)
    assert "/generate" in "\n".join(serve.ready_lines(served, 1.0))
    engine = FakeEngine(version="base")
    updates = WeightUpdater(engine, None, ModelConfig.read(model), "serve", state=Serving("base"))
    settings = standalone(served.loaded.config)
    app = build_app(settings, engine, updates, GenerationRunner(engine, 0.2, updates), None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        answer = await http.post("/generate", json={"text": "F", "sampling_params": {"max_new_tokens": 2}})
        assert answer.json()["text"] == "GH"
        chat = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert chat.status_code == 422
        assert "no chat template" in chat.json()["detail"]


def _is_held(folder: RunFolder) -> bool:
    """True if no other program can listen on the port of the service, which may not have started yet."""
    port = config.load([folder.config]).config.services.rollout.port
    with socket.socket() as other:
        return other.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_one_command_serves_until_ctrl_c(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "volley", "serve", str(model), "rollout.engine.max_running_requests=4"]
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", env=variables) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        loading = next(line for line in lines if line.startswith("loading"))
        assert _is_held(RunFolder(Path(loading.split("log: ")[1].strip(" )\n")).parent.parent))
        url = next(line for line in lines if line.startswith("ready after")).split(" at ")[1].split()[0]
        token = next(lines).removeprefix("token: ").strip()
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        assert httpx.post(f"{url}/generate", json=body).status_code == 401
        answer = httpx.post(f"{url}/generate", json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)
        assert len(answer.json()["output_ids"]) == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert not list(tmp_path.glob("volley-serve-*"))
