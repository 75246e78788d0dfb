from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.rollout.engines.base import Engine, EngineSpec
from services.rollout.engines.sglang_jax.client import open_engine
from tests.rollout.server import RolloutProcess, running_server
from tests.support import models
from tests.support.tokenizer import FOLDER
from tests.support.torch_client import torch  # noqa: F401

CONFIG = models.tiny_config()
WEIGHTS = models.random_weights(CONFIG, 3)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, session_parts: dict[str, Any]) -> Iterator[RolloutProcess]:
    """One server for all tests of the engine; each test makes the versions it needs."""
    if "server" in session_parts:
        yield session_parts["server"]
        return
    folder: Path = tmp_path_factory.mktemp("rollout")
    with running_server(folder, models.tiny_config()) as server:
        session_parts["server"] = server
        yield server


@pytest.fixture
def prompts() -> list[list[int]]:
    """Twelve prompts of 5 to 40 tokens."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, 500, int(n)).tolist() for n in rng.integers(5, 40, 12)]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tmp_path_factory: pytest.TempPathFactory, session_parts: dict[str, Any]) -> AsyncIterator[Engine]:
    """One engine without a service, with `WEIGHTS` and a tokenizer."""
    if "engine" in session_parts:
        yield session_parts["engine"]
        return
    folder = models.write_hf(tmp_path_factory.mktemp("engine") / "model", CONFIG, WEIGHTS)
    (folder / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    sizes = {"context_length": 256, "max_running_requests": 8, "max_prefill_tokens": 64, "max_total_tokens": 1024}
    async with open_engine(EngineSpec(str(folder), token_paddings=(64,), bs_paddings=(8,), **sizes)) as engine:
        session_parts["engine"] = engine
        yield engine
