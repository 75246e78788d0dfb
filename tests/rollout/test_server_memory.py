"""Memory of a rollout server that `volley plan` estimates, against the arrays of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import jax
import pytest
from jax._src import xla_bridge

from services.rollout.engines.base import EngineSpec
from shared import config
from shared.models.config import ModelConfig
from shared.planning.serving import ServerMemory, kv_token_bytes
from tests.support import families, models
from tools.lower.engine import booted
from volley.planning import server
from volley.planning.devices import DeviceType

N_TOKENS = 2048


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-moe"])
def test_weights_and_pool_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    """The engine that a TPU would have, on a CPU: its pool has rows of 128 numbers."""
    models.write_hf(tmp_path / "model", families.case(name).config)
    sizes = {"context_length": 256, "max_running_requests": 8, "max_prefill_tokens": 64, "max_total_tokens": N_TOKENS}
    spec = EngineSpec(str(tmp_path / "model"), load_weights=False, dtype="bfloat16", device="tpu", **sizes)
    runner = booted(spec).runner
    model = ModelConfig.read(tmp_path / "model")
    overrides = [f"rollout.engine.{key}={value}" for key, value in sizes.items()]
    run = config.load(
        ["configs/quickstart.yaml"], [*overrides, "model.dtype=bfloat16", "trainer.length_buckets=[256]"]
    ).config
    found = server.estimate(run, model, DeviceType("v5e", "tpu", 2**30))
    assert found.weights == pytest.approx(sum(leaf.nbytes for leaf in runner.model_state_leaves), rel=0.02)
    pool = sum(buffer.nbytes for buffer in jax.tree.leaves(runner.token_to_kv_pool.kv_buffer))
    assert found.token == kv_token_bytes(model, "bfloat16", "tpu")
    assert found.pool == pytest.approx(pool, rel=0.02)


@pytest.mark.parametrize("device", ["cpu", "tpu", "gpu"])
def test_jax_knows_the_platform_of_an_engine_and_takes_no_other(device: Literal["cpu", "tpu", "gpu"]) -> None:
    platform = EngineSpec("model", device=device).platform
    assert xla_bridge.expand_platform_alias(platform) == [platform]


def test_the_pool_of_a_cpu_is_a_sixteenth_of_its_memory_at_most() -> None:
    sizes = ServerMemory(weights=0, step=0, token=1 << 10)
    assert sizes.default_pool(1000, 1000, 1 << 30) == 1 << 16
    assert sizes.default_pool(2, 1000, 1 << 30) == 8000
