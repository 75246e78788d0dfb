"""The real engine's deltas and most likely tokens, against the results and a float64 reference."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.rollout.engines.base import Engine, GenerateRequest, NewTokens, TopTokens
from services.rollout.engines.base import SamplingParams as Sampling
from tests.rollout.conftest import CONFIG, WEIGHTS
from tests.support import decoder_reference

pytestmark = pytest.mark.asyncio(loop_scope="session")


def request(rid: str, prompt: list[int], n: int, *, top: int = 0, temperature: float = 0.0) -> GenerateRequest:
    sampling = Sampling(max_new_tokens=n, temperature=temperature, ignore_eos=True, sampling_seed=5)
    return GenerateRequest(rid, np.array(prompt, np.int32), sampling, top_logprobs=top)


async def test_tokens_arrive_as_they_are_sampled(engine: Engine, prompts: list[list[int]]) -> None:
    """Beside requests that neither stream nor want the most likely tokens."""
    streams: list[list[NewTokens]] = [[] for _ in range(3)]
    asked = [
        request("a", prompts[0], 12, top=4),
        request("b", prompts[1], 9, top=20, temperature=0.7),
        request("c", prompts[2], 10),
        request("d", prompts[3], 11),
    ]
    receivers = [*(stream.append for stream in streams), None]
    results = await asyncio.gather(*map(engine.generate, asked, receivers))
    for asking, stream, result in zip(asked, streams, results, strict=False):
        assert len(stream) == len(result.output_ids)
        assert np.concatenate([new.output_ids for new in stream]).tolist() == result.output_ids.tolist()
        assert np.concatenate([new.logprobs for new in stream]).tolist() == result.logprobs.tolist()
        assert {new.version for new in stream} == {span.version for span in result.versions}
        tops = [new.top for new in stream if new.top is not None]
        assert len(tops) == (len(stream) if asking.top_logprobs else 0)
        if result.top is not None:
            assert np.concatenate([top.ids for top in tops]).tolist() == result.top.ids.tolist()
            assert np.concatenate([top.logprobs for top in tops]).tolist() == result.top.logprobs.tolist()
    for asking, result in zip(asked[:2], results, strict=False):
        temperature = asking.sampling.temperature or 1.0
        expected = most_likely(asking.input_ids.tolist(), result.output_ids.tolist(), temperature)
        assert_same_top(result.top, expected[:, : asking.top_logprobs])
    assert results[0].top is not None
    assert results[0].top.ids[:, 0].tolist() == results[0].output_ids.tolist()
    assert [result.top for result in results[2:]] == [None, None]


async def test_given_tokens_are_scored_with_the_most_likely_ones(engine: Engine) -> None:
    """Texts of one prefill and of several."""
    rng = np.random.default_rng(4)
    for n, k in ((9, 1), (150, 20)):
        ids = rng.integers(3, 500, n).astype(np.int32)
        scored = await engine.score(ids, top_logprobs=k)
        assert scored.logprobs.shape == (n - 1,)
        assert_same_top(scored.top, most_likely(ids[:1].tolist(), ids[1:].tolist(), 1.0)[:, :k])
        assert (await engine.score(ids)).top is None


def most_likely(prompt: list[int], ids: list[int], temperature: float) -> np.ndarray:
    """float64 [len(ids), V]: sorted log-probabilities at each position, those of the likeliest first."""
    rows = decoder_reference.logits(WEIGHTS, CONFIG, [*prompt, *ids])[len(prompt) - 1 : -1]
    return -np.sort(-np.stack([decoder_reference.log_softmax(row, temperature) for row in rows]), axis=-1)


def assert_same_top(top: TopTokens | None, expected: np.ndarray) -> None:
    assert top is not None
    assert top.ids.dtype == np.int32
    assert len({tuple(row) for row in np.sort(top.ids)}) > 1
    np.testing.assert_allclose(top.logprobs, expected, atol=1e-4)


async def test_cancelled_streams_stop(engine: Engine, prompts: list[list[int]]) -> None:
    """There are five times as many as run at once, so that some are left when the engine is paused."""
    sampled = asyncio.Semaphore(0)
    running = [
        asyncio.ensure_future(engine.generate(request(f"a{i}", prompts[0][:5], 240), lambda _: sampled.release()))
        for i in range(40)
    ]
    for _ in range(5):
        await sampled.acquire()
    await engine.pause()
    paused = await engine.status()
    assert paused.running + paused.queued
    for one in running:
        one.cancel()
    ends = await asyncio.gather(*running, return_exceptions=True)
    assert any(isinstance(end, asyncio.CancelledError) for end in ends)
    async with asyncio.timeout(60):
        while (status := await engine.status()).running or status.queued:
            await asyncio.sleep(0.01)
    await engine.resume()
    more = (await engine.status()).output_tokens - paused.output_tokens
    assert more <= paused.running  # of a step that was running at the pause


async def test_an_error_of_the_receiver_ends_its_request_alone(engine: Engine, prompts: list[list[int]]) -> None:
    def fail(_: NewTokens) -> None:
        raise ValueError("the client's queue is full")

    other = asyncio.ensure_future(engine.generate(request("b", prompts[1], 60)))
    with pytest.raises(ValueError, match="queue is full"):
        await engine.generate(request("a", prompts[0], 200), fail)
    assert len((await other).output_ids) == 60
    assert (await engine.status()).running <= 1
    again = await engine.generate(request("a", prompts[0], 4))
    assert len(again.output_ids) == 4
