"""Every family in the real engine: what transformers computes, from a Hugging Face folder and after an update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engines.base import EngineSpec, GenerateRequest, SamplingParams
from services.rollout.engines.sglang_jax.client import open_engine
from services.rollout.weights.checkpoint import examine
from shared.errors import WeightsError
from shared.models.config import ModelConfig
from shared.run.weights import Probe
from tests.support import decoder_reference, families, models

SIZES = {"max_running_requests": 4, "context_length": 64, "max_prefill_tokens": 64, "max_total_tokens": 256}
VERSION = "e000001-s000001"


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-tied", "llama-scaled", "qwen2", "qwen3-moe", "gemma2"])
async def test_the_engine_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """The log-probabilities of the folder's weights are those that transformers gave; of an update, those of the
    reference. An update of other weights than its probe's is refused, and the ones before go on serving.
    """
    case = families.case(name)
    folder = models.write_hf(tmp_path / "hf", case.written, case.weights)
    later = models.random_weights(case.config, 9)
    probe = Probe(tuple(case.ids.tolist()), tuple(_scores(later, case)), 1e-6)
    root = tmp_path / "checkpoints"
    checkpoint = models.write_checkpoint(root, VERSION, case.config, later, probe=probe, model=case.written)
    staged = examine(checkpoint, ModelConfig.parse(case.written), "test")
    wrong = replace(staged, probe_logprobs=np.asarray(case.logprobs, np.float32))
    async with open_engine(EngineSpec(str(folder), **SIZES)) as engine:
        prompt = case.ids[:40]
        sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
        before = await engine.generate(GenerateRequest("a", prompt, sampling))
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
