"""Streams, stop strings, batches and log-probabilities of the OpenAI routes, with OpenAI's own client over a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.engines.base import EngineInfo, GenerateRequest, GenerateResult, NewTokens, OnTokens
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared.errors import EngineDied
from shared.models.config import ModelConfig
from tests.support import models
from tests.support.asgi import served
from tests.support.engine import SETTINGS, FakeEngine
from tests.support.tokenizer import tiny_tokenizer

HI: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOKENIZER = tiny_tokenizer()


def saying(text: str, *, ended: bool = True) -> Callable[[GenerateRequest], np.ndarray]:
    """Draw of an engine whose answer is a text."""
    return lambda _: np.array([*TOKENIZER.encode(text), *([TOKENIZER.eos_id] if ended else [])], np.int32)


@dataclass
class Speaking(FakeEngine):
    """Args: dies: after the first token of a stream."""

    dies: bool = False
    info: EngineInfo = field(default_factory=lambda: EngineInfo(512, 256, 4096, 16, (TOKENIZER.eos_id,), 0.0, 1))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        if self.dies and on_tokens is not None:
            on_tokens(NewTokens(np.array(TOKENIZER.encode("H"), np.int32), np.zeros(1, np.float32)))
            raise EngineDied("out of memory")
        return await super().generate(request, on_tokens)


@dataclass
class Server:
    engine: Speaking
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient


@asynccontextmanager
async def running(folder: Path, text: str = "Hello, 😀 you!", **engine: Any) -> AsyncIterator[Server]:
    speaking = Speaking(version="e000001-s000000", draw=saying(text), **engine)
    state = Serving("e000001-s000000")
    updates = WeightUpdater(speaking, folder, ModelConfig.parse(models.tiny_config()), "test", state=state)
    app = build_app(SETTINGS, speaking, updates, GenerationRunner(speaking, 0.2, updates), None)
    async with (
        served(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=url) as http,
    ):
        yield Server(speaking, client, http)


async def test_text_arrives_while_it_is_sampled(tmp_path: Path) -> None:
    async with running(tmp_path, delay_s=0.5) as server:
        stream = await server.client.chat.completions.create(**HI, stream=True)
        began, found = time.monotonic(), list[tuple[float, str]]()
        async for chunk in stream:
            found.append((time.monotonic() - began, chunk.choices[0].delta.content or ""))
        texts = [text for _, text in found if text]
        assert "".join(texts) == "Hello, 😀 you!"
        assert "😀" in texts
        assert len(texts) > 5
        assert found[0][0] < 0.25 < found[-1][0]


async def test_a_stop_string_ends_decoding(tmp_path: Path) -> None:
    async with running(tmp_path, "one two three four five " * 4, delay_s=0.5) as server:
        for stream in (False, True):
            began = time.monotonic()
            answer = await server.client.chat.completions.create(**HI, stop=[" three", "never"], stream=stream)
            if stream:
                chunks = [chunk.choices[0] async for chunk in answer]
                text = "".join(one.delta.content or "" for one in chunks)
                reason, ids = chunks[-1].finish_reason, chunks[-1].token_ids
            else:
                choice = answer.choices[0]
                text, reason, ids = choice.message.content, choice.finish_reason, choice.token_ids
            assert (text, reason) == ("one two", "stop")
            assert TOKENIZER.decode(ids) == "one two three"
            assert time.monotonic() - began < 0.4
        assert not server.engine.waiting


async def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    async with running(tmp_path, "word " * 40, delay_s=60) as server:
        stream = await server.client.chat.completions.create(**HI, stream=True, n=2)
        async for _ in stream:
            break
        assert len(server.engine.waiting) == 2
        await stream.close()
        async with asyncio.timeout(1):
            while server.engine.waiting:
                await asyncio.sleep(0.01)


async def test_errors_before_and_in_a_stream_reach_the_client(tmp_path: Path) -> None:
    async with running(tmp_path, delay_s=0.5) as server:
        with pytest.raises(openai.UnprocessableEntityError, match="context"):
            await server.client.chat.completions.create(**HI, stream=True, max_tokens=999)
        server.engine.dies = True
        stream = await server.client.chat.completions.create(**HI, stream=True)
        texts = list[str | None]()
        with pytest.raises(openai.APIError, match="out of memory"):
            texts += [chunk.choices[0].delta.content async for chunk in stream]
        assert not server.engine.waiting


async def test_log_probabilities_of_a_stream_are_those_of_the_whole(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        asked = {**HI, "logprobs": True, "top_logprobs": 2}
        whole = (await server.client.chat.completions.create(**asked)).choices[0].logprobs.content
        stream = await server.client.chat.completions.create(**asked, stream=True)
        parts = [part async for chunk in stream if (part := chunk.choices[0].logprobs)]
        assert [row for part in parts for row in part.content] == whole
        assert [len(row.top_logprobs) for row in whole] == [2] * len(whole)
        assert all(row.top_logprobs[0].logprob == row.logprob == -0.5 for row in whole)
        text = (await server.client.completions.create(model="m", prompt="x", logprobs=2)).choices[0].logprobs
        assert text.tokens == [row.token for row in whole]
        assert all(row[token] == -0.5 for row, token in zip(text.top_logprobs, text.tokens, strict=True))
        stream = await server.client.completions.create(model="m", prompt="x", logprobs=2, stream=True)
        parts = [part async for chunk in stream if (part := chunk.choices[0].logprobs)]
        assert [row for part in parts for row in part.tokens] == text.tokens


async def test_a_batch_is_answered_in_the_order_of_its_prompts(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        server.engine.draw = lambda request: np.array([int(request.input_ids[-1]) + 1], np.int32)
        for prompt in (["a", "b"], [TOKENIZER.encode("a"), TOKENIZER.encode("b")]):
            answer = await server.client.completions.create(model="m", prompt=prompt, n=2, max_tokens=1)
            assert [choice.text for choice in answer.choices] == ["b", "b", "c", "c"]
            assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
            assert answer.usage.prompt_tokens == 2
        for wrong in ([], [[]], ["a", [1]], [[1], ["a"]]):
            with pytest.raises(openai.UnprocessableEntityError):
                await server.client.completions.create(model="m", prompt=wrong)


@pytest.mark.parametrize("n", [0, 1])
async def test_an_echo_has_the_log_probabilities_of_the_prompt(tmp_path: Path, n: int) -> None:
    """As lm-eval's `local-completions` asks for multiple choice."""
    async with running(tmp_path) as server:
        answer = await server.client.completions.create(
            model="m", prompt=["2 + 2", "1"], echo=True, logprobs=1, max_tokens=n, temperature=0
        )
        first, second = answer.choices
        sampled = TOKENIZER.encode("H")[:n]
        ids = [*TOKENIZER.encode("2 + 2"), *sampled]
        assert first.text == "2 + 2" + TOKENIZER.decode(sampled)
        assert first.logprobs.tokens == [TOKENIZER.token(one) for one in ids]
        expected = [None, *(-0.25 * (np.arange(len(ids) - n - 1) + 1)), *([-0.5] * n)]
        assert first.logprobs.token_logprobs == expected
        assert first.logprobs.top_logprobs[0] is None
        assert [max(row.values()) for row in first.logprobs.top_logprobs[1:]] == expected[1:]
        assert first.logprobs.text_offset[-1] == len(first.text) - 1
        assert second.logprobs.token_logprobs == [None, *([-0.5] * n)]
        with pytest.raises(openai.UnprocessableEntityError, match="max_tokens"):
            await server.client.completions.create(model="m", prompt="x", max_tokens=0)
