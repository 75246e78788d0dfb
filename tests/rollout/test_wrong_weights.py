"""Weights that are wrong by a single bit, on the real engine, which itself claims that all is well."""

from pathlib import Path

import numpy as np
import pytest

from services.rollout.api.generation import GenerationRunner
from services.rollout.engines.base import EngineSpec
from services.rollout.engines.sglang_jax.client import open_engine
from services.rollout.weights.updater import WeightUpdater
from shared.errors import Unavailable, WeightsError
from shared.models.config import ModelConfig
from shared.run.checkpoint_files import Probe
from tests.rollout.server import CONTEXT, MAX_PREFILL, MAX_RUNNING
from tests.support import decoder_reference, models
from tests.support.engine import generate_request

CONFIG = models.tiny_config()
MODEL = ModelConfig.parse(CONFIG)
PROMPT = list(range(5, 21))


def publish(root: Path, version: str, weights: models.Weights) -> str:
    logprobs = decoder_reference.score(weights, CONFIG, PROMPT[:1], PROMPT[1:])
    probe = Probe(tuple(PROMPT), tuple(logprobs.tolist()))
    return str(models.write_checkpoint(root, version, CONFIG, weights, probe=probe))


@pytest.mark.long
async def test_a_server_that_computes_with_other_weights_than_it_says_answers_nothing(tmp_path: Path) -> None:
    """The next version differs in the lowest bit of one weight: no log-probability could tell. Later memory loses a
    bit.
    """
    spec = EngineSpec(
        str(models.write_hf(tmp_path / "model", CONFIG)),
        load_weights=False,
        max_running_requests=MAX_RUNNING,
        context_length=CONTEXT,
        max_prefill_tokens=MAX_PREFILL,
        token_paddings=(16, 64),
        bs_paddings=(8, 16),
    )
    weights = models.random_weights(CONFIG, 0)
    nudged = weights | {"model.norm.weight": weights["model.norm.weight"].copy()}
    nudged["model.norm.weight"][3] = np.nextafter(nudged["model.norm.weight"][3], np.float32(2))
    async with open_engine(spec, "tests.rollout.stubborn_worker") as engine:
        updates = WeightUpdater(engine, tmp_path, MODEL, "test")
        generation = GenerationRunner(engine, 1.0, updates)
        wanted = generate_request({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}, engine.info)
        await updates.update(publish(tmp_path, "e000001-s000000", weights), None)
        await updates.audit()
        await generation.run([wanted])
        with pytest.raises(WeightsError, match="computes with other arrays"):
            await updates.update(publish(tmp_path, "e000001-s000001", nudged), None)
        with pytest.raises(Unavailable, match="differs from the weights that were loaded"):
            await generation.run([wanted])
        await updates.update(publish(tmp_path, "e000001-s000002", weights), None)  # by chance what it has
        await generation.run([wanted])
        await engine.flush_cache()
        await updates.audit()
        assert updates.current is None
        with pytest.raises(Unavailable, match="computes with other arrays"):
            await generation.run([wanted])
