"""What the tests of the env service share: GSM8K files, the app over ASGI, a scripted environment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from services.env.app import open_env
from services.env.settings import EnvSettings
from shared.run_config import run_model
from shared.services_schema import Limits, TokenFiles

ROWS = [
    {
        "question": "Ann has 48 eggs and sells half. How many are left?",
        "answer": "She has 48/2 = <<48/2=24>>24 eggs.\n#### 24",
    },
    {
        "question": "A car costs $1,000 and gains 8%. Its price?",
        "answer": "It gains 1000*0.08 = <<1000*0.08=80>>80.\nNow 1000+80 = <<1000+80=1080>>$1,080.\n#### 1,080",
    },
    {"question": "Bo owes 5 and has 2. His balance?", "answer": "He has 2-5 = <<2-5=-3>>-3.\n#### -3"},
]


@pytest.fixture
def gsm8k_files(tmp_path: Path) -> dict[str, Path]:
    """train: the first two problems; eval: the third."""
    files = {"train": tmp_path / "train.jsonl", "eval": tmp_path / "test.jsonl"}
    files["train"].write_bytes(b"\n".join(orjson.dumps(row) for row in ROWS[:2]) + b"\n")
    files["eval"].write_bytes(orjson.dumps(ROWS[2]) + b"\n")
    return files


NAMES = ("a", "adder", "bad", "canary", "compass", "late", "one", "other", "two")
"""What tests submit, also where this machine confines nothing."""

type OpenClient = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@asynccontextmanager
async def open_service(folder: Path, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    defaults: dict[str, Any] = {
        "env": "frozen_lake",
        "configs": {},
        "max_episodes": 16,
        "ttl_s": 60.0,
        "deadline_s": 20.0,
        "n_threads": 2,
        "limits": Limits(max_body_bytes=10_000),
        "token_files": TokenFiles(),
        "folder": folder,
        "max_sandboxes": 16,
    }
    own = {field.name for field in fields(EnvSettings)}
    section = {name: changes.pop(name) for name in changes.keys() - own}
    section = {"unsandboxed": NAMES, "package_index": "http://127.0.0.1:9/simple", **section}
    services = run_model().model_fields["services"].annotation
    defaults["section"] = services.model_fields["env"].annotation(**section)
    async with (
        open_env(EnvSettings(**{**defaults, **changes})) as service,
        httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://env") as client,
        asyncio.TaskGroup() as workers,
    ):
        tasks = [workers.create_task(work()) for work in service.workers]
        try:
            yield client
        finally:
            for task in tasks:
                task.cancel()


@pytest.fixture
def open_client(tmp_path: Path) -> OpenClient:
    """An HTTP client of the service in this process, its workers running; keyword arguments change its settings."""
    return partial(open_service, tmp_path / "environments")
