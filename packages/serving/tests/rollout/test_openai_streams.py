"""Streams, stop strings, batches and log-probabilities of the OpenAI routes, with OpenAI's own client over a socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.rollout.speaking import TOKENIZER, running

HI: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_text_arrives_while_it_is_sampled(tmp_path: Path) -> None:
    """Each text that the client gets lets the engine sample one more token; the bytes of 😀 are four."""
    async with running(tmp_path) as server:
        server.engine.tokens, texts = asyncio.Semaphore(5), list[str]()
        stream = await server.client.chat.completions.create(**HI, stream=True)
        async with asyncio.timeout(60):
            async for chunk in stream:
                if text := chunk.choices[0].delta.content:
                    texts.append(text)
                    server.engine.tokens.release()
        assert "".join(texts) == "Hello, 😀 you!"
        assert "😀" in texts
        assert len(texts) > 5


async def test_a_stop_string_ends_decoding(tmp_path: Path) -> None:
    said = "one two three four five " * 4
    async with running(tmp_path, said, delay_s=1) as server:
        for stream in (False, True):
            server.engine.n_sampled = 0
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
            assert 0 < server.engine.n_sampled < len(TOKENIZER.encode(said))
        assert not server.engine.waiting


async def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    async with running(tmp_path, "word " * 40, delay_s=60) as server:
        stream = await server.client.chat.completions.create(**HI, stream=True, n=2)
        async for _ in stream:
            break
        assert len(server.engine.waiting) == 2
        await stream.close()
        async with asyncio.timeout(20):
            while server.engine.waiting:
                await asyncio.sleep(0.01)


async def test_errors_before_and_in_a_stream_reach_the_client(tmp_path: Path) -> None:
    async with running(tmp_path, delay_s=0.5) as server:
        with pytest.raises(openai.BadRequestError, match="context"):
            await server.client.chat.completions.create(**HI, stream=True, max_tokens=9999)
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
