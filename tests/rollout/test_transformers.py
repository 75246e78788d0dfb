"""The engine beside transformers: ids of `generate`, distributions of its logits processors; cache and preemption."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from services.rollout.engines.base import Engine, EngineSpec, GenerateRequest, GenerateResult, SamplingParams
from services.rollout.engines.sglang_jax.client import open_engine
from services.rollout.engines.sglang_jax.scheduling.sampling import _filter
from tests.rollout.conftest import CONFIG, WEIGHTS
from tests.rollout.test_sampling import ALL, chi2_per_degree, draw
from tests.support import decoder_reference, models
from tests.support.torch_client import Torch

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"
PENALTIES = {"frequency_penalty": 0.6, "presence_penalty": 0.4}
WARPERS: dict[str, str] = {
    "temperature": "TemperatureLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
}
FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_k": 7},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 90, "top_p": 0.8, "min_p": 0.01},
]

pytestmark = pytest.mark.asyncio(loop_scope="session")


def asked(rid: str, prompt: list[int], n: int = 24, **sampling: Any) -> GenerateRequest:
    given = {"temperature": 0.0, "ignore_eos": True} | sampling
    return GenerateRequest(rid, np.array(prompt, np.int32), SamplingParams(max_new_tokens=n, **given))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The session's model, for transformers."""
    return str(models.write_hf(tmp_path_factory.mktemp("transformers"), CONFIG, WEIGHTS))


async def compare(engine: Engine, torch: Torch, folder: str, prompts: list[list[int]], n: int, **options: Any) -> None:
    """Ask for all at once: ids are those of `generate`, log-probabilities those without penalties."""
    sampling = {name: value for name, value in options.items() if name != "eos_token_id"}
    if stop := options.get("eos_token_id"):
        sampling |= {"stop_token_ids": tuple(stop)}
    requests = [asked(f"{i}", prompt, n, **sampling) for i, prompt in enumerate(prompts)]
    found = await asyncio.gather(*map(engine.generate, requests))
    known = torch.ask("generate", folder=folder, prompts=prompts, n=n, options=options)
    for i, answer in enumerate(found):
        assert answer.output_ids.tolist() == known[f"ids {i}"].tolist(), (options, i)
        np.testing.assert_allclose(answer.logprobs, known[f"logprobs {i}"], rtol=0, atol=1e-4)


async def test_greedy_ids_are_those_of_generate(
    engine: Engine, torch: Torch, folder: str, prompts: list[list[int]]
) -> None:
    """Also with penalties, which transformers gets from a processor of OpenAI's formula, and with biases."""
    await compare(engine, torch, folder, prompts, 24)
    await compare(engine, torch, folder, prompts[:4], 24, **PENALTIES)
    await compare(engine, torch, folder, prompts[:4], 24, frequency_penalty=-0.2, logit_bias=[(7, 3.0), (11, -4.0)])


async def test_an_answer_ends_where_that_of_generate_ends(
    engine: Engine, torch: Torch, folder: str, prompts: list[list[int]]
) -> None:
    free = await engine.generate(asked("free", prompts[1], 24, **PENALTIES))
    stops = [int(free.output_ids[4]), int(free.output_ids[17])]
    for least in (0, 9):
        await compare(engine, torch, folder, prompts[:4], 24, eos_token_id=stops, min_new_tokens=least, **PENALTIES)


def chi2(tokens: np.ndarray, p: np.ndarray) -> float:
    """χ² a degree of freedom, of draws among the tokens that p allows."""
    kept = np.flatnonzero(p)
    assert set(tokens.tolist()) <= set(kept.tolist())
    return chi2_per_degree(np.searchsorted(kept, tokens), p[kept])


def of_transformers(torch: Torch, logits: np.ndarray) -> np.ndarray:
    """Float64 [len(FILTERS), n, V]: the kept logits, each filter on the distribution at the temperature by itself."""
    each = [
        [
            [("TemperatureLogitsWarper", case["temperature"])],
            *([(WARPERS[name], value)] for name, value in rest.items()),
        ]
        for case in FILTERS
        for rest in [{name: value for name, value in case.items() if name != "temperature"}]
    ]
    cases = [[*first, *one] for first, *others in each for one in others]
    made = iter(torch.ask("filtered", {"logits": logits}, cases=cases)["logits"])
    return np.stack([np.min([next(made) for _ in others], axis=0) for _, *others in each])


async def test_the_tokens_that_stay_are_those_of_transformers(torch: Torch, prompts: list[list[int]]) -> None:
    """Top-k, top-p and min-p at a temperature: the same tokens, with the same probabilities; and draws follow them."""
    logits = decoder_reference.logits(WEIGHTS, CONFIG, prompts[3]).astype(np.float32)
    known = of_transformers(torch, logits)
    n, worst = len(logits), 0.0
    for case, expected in zip(FILTERS, known, strict=True):
        given = {"top_k": ALL, "top_p": 1.0, "min_p": 0.0} | case
        rows = [np.full(n, given[name], dtype) for name, dtype in (("top_p", np.float32), ("min_p", np.float32))]
        kept = jax.jit(_filter)(logits / np.float32(case["temperature"]), *rows, np.full(n, given["top_k"], np.int32))
        kept = np.asarray(kept, np.float64)
        assert (np.isfinite(kept) == np.isfinite(expected)).all(), case
        p, q = np.exp(decoder_reference.log_softmax(expected)), np.exp(decoder_reference.log_softmax(kept))
        worst = max(worst, np.abs(p - q).max())
        tokens, _ = draw(5000, scores=logits[-1], **case)
        assert chi2(tokens, p[-1]) < 2
    assert worst < 1e-6


async def test_draws_of_the_engine_follow_the_distribution_of_transformers(
    engine: Engine, torch: Torch, prompts: list[list[int]]
) -> None:
    logits = decoder_reference.logits(WEIGHTS, CONFIG, prompts[3])[-1:]
    for number, (case, expected) in enumerate(zip(FILTERS, of_transformers(torch, logits), strict=True)):
        requests = [asked(f"{number}-{i}", prompts[3], 1, sampling_seed=i, **case) for i in range(500)]
        answers = await asyncio.gather(*map(engine.generate, requests))
        tokens = np.array([answer.output_ids[0] for answer in answers])
        p = np.exp(decoder_reference.log_softmax(expected[0]))
        assert chi2(tokens, p) < 2


async def test_neither_cache_nor_preemption_changes_an_answer(engine: Engine, prompts: list[list[int]]) -> None:
    """A turn after a cached one. Eight requests of 200 tokens in a pool of 1,024: some are computed again, because the
    scheduler expects that answers end early which have a token that ends them.
    """
    sampling = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.8, **PENALTIES}]
    requests = [asked(f"{i}", prompt, 180, sampling_seed=i, **sampling[i % 3]) for i, prompt in enumerate(prompts[:8])]
    cold = [await fresh(engine, request) for request in requests]
    turns = [[*prompt, *one.output_ids[:30].tolist(), 9, 8, 7] for prompt, one in zip(prompts, cold, strict=False)]
    later = [asked(f"{i}, second turn", ids, 20, **sampling[0]) for i, ids in enumerate(turns)]
    cold += [await fresh(engine, request) for request in later]
    assert not any(answer.cached_tokens for answer in cold)

    warm = list[GenerateResult]()
    for first, second in zip(requests, later, strict=True):
        await engine.generate(first)
        warm += [await engine.generate(first), await engine.generate(second)]
        assert warm[-2].cached_tokens == len(first.input_ids) - 1
        assert warm[-1].cached_tokens >= len(first.input_ids) + 30
    await engine.flush_cache()
    before = (await engine.status()).steps["prefill_tokens"]
    unused = min(set(range(CONFIG["vocab_size"])) - {token for one in cold for token in one.output_ids.tolist()})
    may_end = [replace(one, sampling=replace(one.sampling, stop_token_ids=(unused,))) for one in requests]
    crowd = await asyncio.gather(*map(engine.generate, may_end))
    computed = (await engine.status()).steps["prefill_tokens"] - before
    assert computed > sum(len(request.input_ids) for request in requests) + 100, "nothing was preempted"
    known = {one.rid: one for one in cold}
    for answer in (*warm, *crowd):
        assert answer.output_ids.tolist() == known[answer.rid].output_ids.tolist()
    worst = [np.abs(answer.logprobs - known[answer.rid].logprobs).max() for answer in (*warm, *crowd)]
    assert max(worst) < 1e-5


async def fresh(engine: Engine, request: GenerateRequest) -> GenerateResult:
    await engine.flush_cache()
    return await engine.generate(request)


@pytest.mark.long
@pytest.mark.skipif(not SMOLLM2.exists(), reason="volley model get smollm2 models/smollm2")
async def test_greedy_ids_of_smollm2_are_those_of_generate(torch: Torch) -> None:
    rng = np.random.default_rng(0)
    prompts = [[1, 9690, 198, 2683, 359], *(rng.integers(20, 49_000, n).tolist() for n in (17, 60))]
    sizes = {"context_length": 128, "max_running_requests": 4, "max_prefill_tokens": 64, "max_total_tokens": 512}
    async with open_engine(EngineSpec(str(SMOLLM2), token_paddings=(64,), bs_paddings=(4,), **sizes)) as engine:
        await compare(engine, torch, str(SMOLLM2), prompts, 32)
        await compare(engine, torch, str(SMOLLM2), prompts, 32, **PENALTIES)
