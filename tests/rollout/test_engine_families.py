"""Every family in the real engine: what transformers computes, from a Hugging Face folder and after an update."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engines.base import EngineSpec, GenerateRequest, SamplingParams
from services.rollout.engines.sglang_jax.client import open_engine
from services.rollout.weights.checkpoint import examine
from shared.errors import WeightsError
from shared.models.config import ModelConfig
from shared.run.checkpoint_files import Probe
from tests.rollout.test_transformers import PENALTIES, compare
from tests.support import decoder_reference, families, models
from tests.support.torch_client import Torch
from volley.layout import PROJECT, python_of

SIZES = {"max_running_requests": 4, "context_length": 64, "max_prefill_tokens": 64, "max_total_tokens": 256}
VERSION = "e000001-s000001"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The model of every family, with the trainer's log-probabilities of its case's tokens."""
    root, made = tmp_path_factory.mktemp("families"), dict[str, Path]()
    for name in families.NAMES:
        case = families.case(name)
        made[name] = models.write_hf(root / name, case.written, case.weights)
        np.save(made[name] / "ids.npy", case.ids)
    command = [python_of("trainer"), "-m", "tests.support.trainer_scores", *made.values()]
    subprocess.run(command, cwd=PROJECT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True)
    return made


@pytest.mark.long
@pytest.mark.parametrize("name", families.NAMES)
async def test_the_engine_computes_what_transformers_computes(
    name: str, folders: Mapping[str, Path], torch: Torch, tmp_path: Path
) -> None:
    """With the folder's weights, ids and log-probabilities are those of transformers, and the trainer's; of an update,
    those of the reference. An update of other weights than its probe's is refused, and the ones before go on serving.
    """
    case, folder = families.case(name), folders[name]
    later = models.random_weights(case.config, 9)
    scores = tuple(_scores(later, case))
    probe = Probe(tuple(case.ids.tolist()), scores, (1e-6,) * len(scores))
    root = tmp_path / "checkpoints"
    checkpoint = models.write_checkpoint(root, VERSION, case.config, later, probe=probe, model=case.written)
    staged = examine(checkpoint, ModelConfig.parse(case.written), "test")
    wrong = replace(staged, probe_logprobs=np.asarray(case.logprobs, np.float32))
    async with open_engine(EngineSpec(str(folder), **SIZES)) as engine:
        prompt = case.ids[:40]
        sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
        before = await engine.generate(GenerateRequest("a", prompt, sampling))
        for options in ({}, PENALTIES):
            await compare(engine, torch, str(folder), [prompt.tolist(), case.ids[3:20].tolist()], 16, **options)
        scored, trained = (await engine.score(case.ids)).logprobs, np.load(folder / "logprobs.npy")
        np.testing.assert_allclose(scored, case.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(scored, trained, rtol=0, atol=1e-5)
        with pytest.raises(WeightsError, match="fingerprint"):
            await engine.stage(wrong)
        loaded = await engine.stage(staged)
        committed = await engine.commit(VERSION, "retract")
        after = await engine.generate(GenerateRequest("b", prompt, sampling))
        live = await engine.audit()
    assert committed.live.checksum == live.checksum == loaded.checksum
    assert live.logprobs is not None
    for answer, weights in ((before, case.weights), (after, later)):
        expected = decoder_reference.score(weights, case.config, prompt.tolist(), list(answer.output_ids))
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    np.testing.assert_allclose(live.logprobs, _scores(later, case)[: len(live.logprobs)], atol=1e-4)


def _scores(weights: models.Weights, case: families.FamilyCase) -> list[float]:
    ids = case.ids.tolist()
    return decoder_reference.score(weights, case.config, ids[:1], ids[1:]).tolist()


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "gemma2"])
async def test_the_engine_computes_in_bfloat16_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """Within the rounding of bfloat16, for one request and for several, whose keys and values are cached."""
    case = families.case(name)
    folder = models.write_hf(tmp_path / "hf", case.written, case.weights)
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    async with open_engine(EngineSpec(str(folder), dtype="bfloat16", **SIZES)) as engine:
        alone = await engine.generate(GenerateRequest("a", case.ids[:40], sampling))
        requests = [GenerateRequest(f"b{n}", case.ids[: 36 + n], sampling) for n in range(4)]
        together = await asyncio.gather(*(engine.generate(request) for request in requests))
    for request, answer in [
        (GenerateRequest("a", case.ids[:40], sampling), alone),
        *zip(requests, together, strict=True),
    ]:
        prompt = request.input_ids.tolist()
        expected = decoder_reference.score(case.weights, case.config, prompt, list(answer.output_ids))
        atol = 0.15 if "moe" in name else 0.06  # rounding sends some tokens to other experts
        np.testing.assert_allclose(answer.logprobs, expected, atol=atol)


@pytest.mark.long
async def test_experts_and_paddings_that_suit_no_tile(tmp_path: Path) -> None:
    """Three of six experts a token, and 64 tokens at once: 192 rows."""
    case = families.case("qwen3-moe")
    config = {**case.config, "num_experts": 6, "num_experts_per_tok": 3}
    written = {**case.written, "num_experts": 6, "num_experts_per_tok": 3}
    weights = models.random_weights(config, 3)
    folder = models.write_hf(tmp_path / "hf", written, weights)
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    async with open_engine(EngineSpec(str(folder), token_paddings=(64,), **SIZES)) as engine:
        answer = await engine.generate(GenerateRequest("a", case.ids[:40], sampling))
    expected = decoder_reference.score(weights, config, case.ids[:40].tolist(), list(answer.output_ids))
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
