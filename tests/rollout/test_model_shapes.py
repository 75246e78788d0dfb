"""The real engine on a model of heads of 64, three queries to a key, whose θ stands where transformers 5 writes it."""

from pathlib import Path

import numpy as np
import pytest

from services.rollout.engines.base import EngineSpec, GenerateRequest, SamplingParams
from services.rollout.engines.sglang_jax.client import open_engine
from tests.support import decoder_reference, models

CONFIG = models.tiny_config(head_dim=64, num_attention_heads=9, num_key_value_heads=3, rope_theta=500.0)


@pytest.mark.long
async def test_the_engine_computes_what_the_configuration_means(tmp_path: Path) -> None:
    weights = models.random_weights(CONFIG, 1)
    newer = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    newer["rope_parameters"] = {"rope_theta": 500.0, "rope_type": "default"}
    folder = models.write_hf(tmp_path / "model", newer, weights)
    sizes = {"max_running_requests": 8, "context_length": 128, "max_prefill_tokens": 64, "max_total_tokens": 512}
    prompt = np.random.default_rng(0).integers(3, 500, 40).astype(np.int32)
    async with open_engine(EngineSpec(str(folder), **sizes)) as engine:
        sampling = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
        answer = await engine.generate(GenerateRequest(rid="one", input_ids=prompt, sampling=sampling))
    expected = decoder_reference.score(weights, CONFIG, prompt.tolist(), list(answer.output_ids))
    np.testing.assert_allclose(answer.logprobs, expected, atol=5e-5)
