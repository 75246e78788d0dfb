"""Servers in the shape of SGLang's and vLLM's, and engines in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from fastapi import FastAPI

from services.rollout.engines.base import EngineServer, EngineSpec, GenerateRequest, SamplingParams
from services.rollout.engines.kinds import opener
from services.rollout.engines.staged import StagedWeights
from services.rollout.weights.checkpoint import examine
from shared.models.config import ModelConfig
from shared.process.ports import free_port
from tests.support import models
from tests.support.asgi import served
from tests.support.decoder_reference import score
from tests.support.foreign_servers import Faults, sglang_app, vllm_app
from tests.support.numpy_engine import NumpyEngine
from volley_engines.engine import HttpEngine

V1, V2, V3 = (f"e000001-s00000{step}" for step in (1, 2, 3))
CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=16, intermediate_size=16, vocab_size=64, eos_token_id=2)
PROMPT = np.array([5, 6, 7], np.int32)
type Kind = Literal["sglang", "vllm"]
APPS: dict[str, Callable[..., FastAPI]] = {"sglang": sglang_app, "vllm": vllm_app}
each_kind = pytest.mark.parametrize("kind", ["sglang", "vllm"])
same_for_each = pytest.mark.parametrize("kind", ["sglang", pytest.param("vllm", marks=pytest.mark.long)])
"""For behaviour of the engine that no kind of server determines."""


@dataclass
class Foreign:
    """A server that can be stopped and started again, which forgets its weights."""

    kind: Kind
    folder: Path
    port: int
    faults: Faults = field(default_factory=Faults)
    context_length: int = 256
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.engine = NumpyEngine(self.folder)
        app = APPS[self.kind](self.engine, self.faults, self.context_length)
        await self._stack.enter_async_context(served(app, port=self.port))

    async def stop(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def running(kind: Kind, folder: Path) -> AsyncIterator[Foreign]:
    """A server with the weights of seed 0."""
    models.write_hf(folder / "model", CONFIG, models.random_weights(CONFIG, 0))
    foreign = Foreign(kind, folder / "model", free_port())
    await foreign.start()
    try:
        yield foreign
    finally:
        await foreign.stop()


@asynccontextmanager
async def in_front(foreign: Foreign) -> AsyncIterator[HttpEngine]:
    spec = EngineSpec(
        str(foreign.folder),
        load_weights=False,
        context_length=64,
        max_running_requests=4,
        server=EngineServer(foreign.url, str(foreign.folder.parent / "loads")),
    )
    async with opener(foreign.kind)(spec) as engine:
        assert isinstance(engine, HttpEngine)
        yield engine


def weights(folder: Path, version: str, seed: int) -> StagedWeights:
    """A checkpoint of the trainer's with a probe."""
    found = models.random_weights(CONFIG, seed)
    where = folder / "checkpoints" / version
    if not where.exists():
        models.write_checkpoint(folder / "checkpoints", version, CONFIG, found)
    ids = np.arange(3, 19, dtype=np.int32)
    expected = score(found, CONFIG, ids[:1].tolist(), ids[1:].tolist()).astype(np.float32)
    return replace(examine(where, ModelConfig.parse(CONFIG), "test"), probe_ids=ids, probe_logprobs=expected)


async def committed(engine: HttpEngine, folder: Path, version: str, seed: int, mode: Any = "retract") -> None:
    await engine.stage(weights(folder, version, seed))
    assert (await engine.commit(version, mode)).live.version == version


def asking(n: int = 8, rid: str = "a", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(rid, PROMPT, SamplingParams(max_new_tokens=n, **{"sampling_seed": 7, **sampling}))
