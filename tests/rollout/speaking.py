"""A rollout service around an engine that says a given text, served over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.engines.base import EngineInfo, GenerateRequest, GenerateResult, NewTokens, OnTokens
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared.errors import EngineDied
from shared.models.chat import ChatTokenizer
from shared.models.config import ModelConfig
from tests.support import models
from tests.support.asgi import served
from tests.support.engine import SETTINGS, FakeEngine
from tests.support.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def saying(text: str, *, ended: bool = True) -> Callable[[GenerateRequest], np.ndarray]:
    """Draw of an engine whose answer is a text."""
    return lambda _: np.array([*TOKENIZER.encode(text), *([TOKENIZER.eos_id] if ended else [])], np.int32)


@dataclass
class Speaking(FakeEngine):
    """Args: dies: after the first token of a stream."""

    dies: bool = False
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    info: EngineInfo = field(default_factory=lambda: EngineInfo(512, 8192, 2**16, 16, (TOKENIZER.eos_id,), 0.0, 1))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        self.requests.append(request)
        if self.dies and on_tokens is not None:
            on_tokens(NewTokens(np.array(TOKENIZER.encode("H"), np.int32), np.zeros(1, np.float32)))
            raise EngineDied("out of memory")
        return await super().generate(request, on_tokens)


@dataclass
class Server:
    engine: Speaking
    client: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: httpx.AsyncClient
    tokenizer: ChatTokenizer

    def say(self, text: str) -> None:
        """Give the next answers."""
        self.engine.draw = saying(text)


@asynccontextmanager
async def running(
    folder: Path, text: str = "Hello, 😀 you!", *, model: Path | None = None, **engine: Any
) -> AsyncIterator[Server]:
    speaking = Speaking(version="e000001-s000000", draw=saying(text), **engine)
    state = Serving("e000001-s000000")
    updates = WeightUpdater(speaking, folder, ModelConfig.parse(models.tiny_config()), "test", state=state)
    settings = replace(SETTINGS, engine=replace(SETTINGS.engine, model_path=str(model))) if model else SETTINGS
    app = build_app(settings, speaking, updates, GenerationRunner(speaking, 0.2, updates), None)
    async with (
        served(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other,
        httpx.AsyncClient(base_url=url) as http,
    ):
        yield Server(speaking, client, other, http, ChatTokenizer(Path(settings.engine.model_path)))
