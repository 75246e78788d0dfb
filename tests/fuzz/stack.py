"""All services of a run in one process, around a simulated engine and a simulated trainer, each on a
socket of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx

from services.env.app import open_service as open_env
from services.orchestrator.app import open_service as open_orchestrator
from shared import config
from shared.process.ports import free_port
from shared.schema import RunConfig
from tests.support.asgi import served
from tests.support.redis import configured
from tests.support.tokenizer import FOLDER
from tests.support.tokens import write_tokens
from tools.simulated.rollout import open_service as open_rollout
from tools.simulated.trainer import open_service as open_trainer

TOKEN = "admin-token-of-a-test"
RUN = "fuzzed"
OPENERS = {"env": open_env, "rollout": open_rollout, "trainer": open_trainer, "orchestrator": open_orchestrator}
PROBLEM = {"question": "How many are 40 and 2?", "answer": "40+2 = <<40+2=42>>42\n#### 42"}


def run_config(folder: Path, redis_url: str, max_body_bytes: int = 100_000) -> RunConfig:
    """A run without an end, whose services ask for tokens."""
    files = write_tokens(folder)
    (folder / "train.jsonl").write_text(json.dumps(PROBLEM), encoding="utf-8")
    tree = {
        "run": {"name": RUN, "dir": str(folder)},
        "model": {"path": str(FOLDER)},
        "data": {
            "env": "frozen_lake",
            "env_config": {"max_turns": 2},
            "train": str(folder / "train.jsonl"),
            "n_eval_tasks": 1,
        },
        "grpo_config": {"num_generations": 2, "max_response_length": 8},
        "trainer": {"max_steps": 1_000_000, "groups_per_step": 1, "length_buckets": [512]},
        "orchestrator": {"max_concurrent_episodes": 2, "max_turns": 2, "episode_timeout_s": 60},
        "services": {
            **configured(redis_url, folder),
            "token_files": files.model_dump(mode="json"),
            "limits": {"max_body_bytes": max_body_bytes, "admin_per_s": 100_000},
            **{name: {"port": free_port()} for name in OPENERS},
            "env": {"port": free_port(), "unsandboxed": ["s1", "s2"]},
        },
    }
    return config.validate(tree).config


@asynccontextmanager
async def open_stack(run: RunConfig) -> AsyncIterator[dict[str, str]]:
    """Yields the services' base URLs by name; the first weights serve, and the run is paused."""
    async with AsyncExitStack() as stack:
        urls, workers = {}, []
        for name, opener in OPENERS.items():
            service = await stack.enter_async_context(opener(run))
            urls[name] = await stack.enter_async_context(served(service.app, port=getattr(run.services, name).port))
            workers += service.workers
            if name == "orchestrator":
                service.app.state.orchestrator.pause()
        group = await stack.enter_async_context(asyncio.TaskGroup())
        tasks = [group.create_task(work()) for work in workers]
        stack.callback(lambda: [task.cancel() for task in tasks])
        await _ready(urls)
        yield urls


async def _ready(urls: dict[str, str]) -> None:
    """Returns once every service is ready. Raises TimeoutError."""
    async with (
        asyncio.timeout(60),
        httpx.AsyncClient(trust_env=False, timeout=60, headers={"Authorization": f"Bearer {TOKEN}"}) as client,
    ):
        for url in urls.values():
            while (await client.get(f"{url}/ready")).status_code != 200:
                await asyncio.sleep(0.05)
