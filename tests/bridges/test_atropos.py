"""Atropos both ways, with the real package: its environments in a run's sessions, its trainer API fed by ours."""

from __future__ import annotations

import asyncio
import os
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from packages.agents.tests.sessions.programs import ProgramEnv, orchestrating
from packages.agents.tests.sessions.recorder import WIDE
from services.env.app import open_env
from services.env.settings import from_config
from services.orchestrator.episodes.budget import TokenBudget
from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared.models.config import ModelConfig
from shared.process.ports import free_port
from tests.orchestrator.fakes import ScriptedEngine, spec
from tests.orchestrator.test_component import run_config
from tests.support import models
from tests.support.asgi import served
from tests.support.engine import FakeEngine
from tests.support.foreign import environment
from tests.support.tokenizer import FOLDER
from volley_serving import serve
from volley_serving.serve import ServeOptions
from volley_serving.server import standalone

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
BRIDGE = Path("bridges/agents").absolute()


@pytest.fixture(scope="module")
def python() -> Path:
    project = tomllib.loads((BRIDGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return environment("atropos", [*project["dependencies"], *project["optional-dependencies"]["atropos"]])


def variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(BRIDGE), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*command, env=variables())
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def test_an_environment_plays_in_the_sessions_of_a_group(python: Path, tmp_path: Path) -> None:
    env, bounds, engine = ProgramEnv(kind="external", judged=False), replace(WIDE, timeout_s=240.0), ScriptedEngine()
    async with orchestrating(tmp_path, env, bounds, engine) as (recorder, runner), served(recorder.app) as url:
        recorder.app.state.sessions.base_url = f"{url}/v1"
        worker = [
            "-m",
            "volley_agents.atropos",
            f"{BRIDGE / 'examples' / 'parity.py'}:ParityEnv",
            "--tokenizer",
            str(FOLDER),
        ]
        async with running(str(python), *worker, "--group-size", "3", "--orchestrator", url, "--parallel", "1"):
            samples = [runner.run(replace(spec(), sample_index=i), TokenBudget(1)) for i in range(3)]
            played = await asyncio.gather(*samples)
    prompts = {tuple(one.token_ids[: one.prompt_len].tolist()) for one in played}
    assert len(prompts) == 1
    for one in played:
        sampled = one.token_ids[one.loss_mask == 1]
        assert one.reward == (sampled % 2).sum()
        assert not one.branches
    assert sorted(map(tuple, engine.outputs)) == sorted(tuple(one.token_ids[one.loss_mask == 1]) for one in played)


@asynccontextmanager
async def a_rollout_server(tmp_path: Path) -> AsyncIterator[str]:
    engine, config = FakeEngine(version="base"), models.tiny_config()
    folder = models.write_hf(tmp_path / "model", config)
    (folder / "model.safetensors").touch()
    (tmp_path / "serve").mkdir()
    settings = standalone(serve.prepare(str(folder), ServeOptions(api_key=""), tmp_path / "serve").loaded.config)
    updates = WeightUpdater(engine, None, ModelConfig.read(folder), "serve", state=Serving("base"))
    app = build_app(settings, engine, updates, GenerationRunner(engine, 0.2, updates), None)
    async with served(app) as url:
        yield url


async def test_a_trainer_is_fed_with_exact_groups(python: Path, tmp_path: Path) -> None:
    port = free_port()
    api = f"http://127.0.0.1:{port}"
    server = ["-m", "uvicorn", "atroposlib.api.server:app", "--port", str(port), "--log-level", "warning"]
    registered = {"wandb_group": "", "wandb_project": "", "batch_size": 6, "max_token_len": 512, "checkpoint_dir": "",
                  "save_checkpoint_interval": 100, "starting_step": 0, "num_steps": 100}  # fmt: skip
    async with (
        running(str(python), *server),
        open_env(from_config(run_config(tmp_path))) as service,
        served(service.app) as env_url,
        a_rollout_server(tmp_path) as rollout_url,
        httpx.AsyncClient(base_url=api, timeout=60) as http,
    ):
        await _until(http, "/info")
        await http.post("/register", json=registered)
        assert (await http.get("/batch")).json() == {"batch": None}  # the trainer begins
        more = ["--env-url", env_url, "--server", rollout_url, "--model", str(FOLDER), "--atropos", api]
        feed = ["-m", "volley_agents.atropos_feed", "frozen_lake", *more, "--group-size", "3", "--groups", "2"]
        async with running(str(python), *feed, "--max-tokens", "5", "--max-turns", "3") as process:
            assert await process.wait() == 0
        batch = (await http.get("/batch")).json()["batch"]
    assert [len(group["tokens"]) for group in batch] == [3, 3]
    for group in batch:
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            assert len(tokens) == len(masks) == len(logprobs)
            assert all(mask in (-100, token) for token, mask in zip(tokens, masks, strict=True))
            assert all((mask == -100) == (logprob == 1.0) for mask, logprob in zip(masks, logprobs, strict=True))
            assert any(mask != -100 for mask in masks)
    assert all(group["env_id"] == 0 for group in batch)


async def _until(http: httpx.AsyncClient, path: str) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                (await http.get(path)).raise_for_status()
            except httpx.HTTPError:
                await asyncio.sleep(0.5)
            else:
                return
