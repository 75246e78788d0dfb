"""The engine tells which experts it has sent tokens to: those that numpy finds in float64, of cached prefixes, of
prompts that are computed in parts, and of requests whose weights change under way.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engines.base import EngineSpec, GenerateRequest, GenerateResult, SamplingParams
from services.rollout.engines.sglang_jax.client import SglangEngine, generate_message, open_engine
from services.rollout.engines.sglang_jax.scheduling.requests import RolloutReq
from services.rollout.engines.sglang_jax.scheduling.routing import RoutingPool, routing_of
from services.rollout.weights.checkpoint import examine
from shared.models.config import ModelConfig
from shared.routing import RoutingShape, from_wire
from tests.support import decoder_reference, families, models
from tests.support.families import FamilyCase
from volley_serving.sglang.generate_answer import answer

SIZES = {"max_running_requests": 4, "context_length": 128, "max_prefill_tokens": 32, "max_total_tokens": 512}
VERSION, LATER = "e000001-s000001", "e000001-s000002"
CASES = ("qwen3-moe", "deepseek-v3")


class _Batch:
    """Of three tokens in slots 4, 2 and 7, filled up to five."""

    out_cache_loc = np.array([4, 2, 7, -1, -1])

    def get_original_input_len(self) -> int:
        return 3


class _Config:
    vocab_size, hf_eos_token_id = 96, {2}


def request(routed_from: int | None) -> RolloutReq:
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True, sampling_seed=1)
    asked = GenerateRequest("a", np.arange(3, 6, dtype=np.int32), sampling, routed_from)
    return RolloutReq(generate_message("a", asked, streamed=False), _Config(), VERSION)


def test_a_request_keeps_the_experts_of_the_step_that_computed_a_position_first() -> None:
    pool, written = RoutingPool(9, RoutingShape(2, 300, 2)), np.arange(5 * 2 * 2).reshape(5, 2, 2)
    pool.write(_Batch(), written)
    assert not pool.of(np.array([0, 1, 3, 5, 6, 8])).any(), "what fills a step up was kept"
    whole, rest, nothing = request(0), request(1), request(None)
    for one in (whole, rest, nothing):
        one.route(pool, np.array([4, 2]))
    pool.write(_Batch(), written + 100)
    for one in (whole, rest, nothing):
        one.route(pool, np.array([4, 2, 7]))
    expected = np.concatenate([written[:2], written[2:3] + 100])
    found = from_wire(whole.result()["routed_experts"])
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(from_wire(rest.result()["routed_experts"]), expected[1:])
    assert "routed_experts" not in nothing.result()


def test_a_dense_model_has_no_experts() -> None:
    assert routing_of(_Config()) is None


@asynccontextmanager
async def engine_of_experts(folder: Path, case: FamilyCase) -> AsyncIterator[SglangEngine]:
    written = models.write_hf(folder / "hf", case.written, case.weights)
    async with open_engine(EngineSpec(str(written), **SIZES)) as engine:
        yield engine


def asked(name: str, ids: np.ndarray, n: int, routed_from: int | None = 0) -> GenerateRequest:
    return GenerateRequest(name, ids, SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True), routed_from)


def of_reference(case: FamilyCase, weights: models.Weights, ids: np.ndarray) -> np.ndarray:
    """[n - 1, L, k], the experts of a token sorted."""
    routed: list[np.ndarray] = []
    decoder_reference.logits(weights, case.config, ids.tolist(), routed=routed)
    return np.sort(np.stack(routed, axis=1), axis=-1)[:-1]


def told(result: GenerateResult) -> np.ndarray:
    assert result.routed_experts is not None
    assert result.routed_experts.dtype == np.uint8
    return np.sort(result.routed_experts, axis=-1)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
async def test_the_experts_are_those_of_the_reference(tmp_path: Path, name: str) -> None:
    case = families.case(name)
    prompt, later = case.ids[:40], models.random_weights(case.config, 9)
    checkpoint = models.write_checkpoint(tmp_path / "checkpoints", LATER, case.config, later, model=case.written)
    staged = examine(checkpoint, ModelConfig.parse(case.written), "test")
    async with engine_of_experts(tmp_path, case) as engine:
        first = await engine.generate(asked("a", prompt, 6))
        ids = np.concatenate([prompt, first.output_ids])
        expected = of_reference(case, case.weights, ids)
        assert first.cached_tokens == 0
        np.testing.assert_array_equal(told(first), expected)

        # A second turn, most of which is cached: alone, and beside others.
        turn = np.concatenate([ids, case.ids[40:44]])
        answers = await asyncio.gather(
            engine.generate(asked("b", turn, 5)), engine.generate(asked("c", turn, 5, len(ids) - 1)),
            engine.generate(asked("d", turn[:-2], 7, None)),
        )  # fmt: skip
        assert answers[0].cached_tokens >= 40
        whole = of_reference(case, case.weights, np.concatenate([turn, answers[0].output_ids]))
        np.testing.assert_array_equal(told(answers[0]), whole)
        np.testing.assert_array_equal(told(answers[1]), whole[len(ids) - 1 :])
        assert answers[2].routed_experts is None
        body = answer(answers[1], arrays=False)["meta_info"]["routed_experts"]
        flat = np.frombuffer(base64.b64decode(body), "<i4")
        np.testing.assert_array_equal(flat, answers[1].routed_experts.reshape(-1))

        # Other weights in the middle of a request: what was computed before is told as it was.
        running = asyncio.create_task(engine.generate(asked("e", prompt, 60)))
        before = (await engine.status()).output_tokens
        while (await engine.status()).output_tokens < before + 4:
            await asyncio.sleep(0.01)
        await engine.pause()
        await engine.stage(staged)
        assert (await engine.commit(LATER, "retract")).continued == 1
        await engine.resume()
        changed = await running
    ids = np.concatenate([prompt, changed.output_ids])
    (old, new), cut = changed.versions, len(prompt) + changed.versions[0].end - 1
    assert (old.version, new.version, new.end) == ("base", LATER, 60)
    np.testing.assert_array_equal(told(changed)[:cut], of_reference(case, case.weights, ids)[:cut])
    np.testing.assert_array_equal(told(changed)[cut:], of_reference(case, later, ids)[cut:])
